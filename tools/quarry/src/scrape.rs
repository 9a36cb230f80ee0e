//! Reading what a process shows on its admin port: one HTTP request with a deadline, and the text format of metrics.
//!
//! Decides nothing about what the numbers mean. Knows as much of the format as our own exporter writes.

use std::{collections::BTreeMap, time::Duration};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// No page of a process is longer.
const PAGE_BYTES_MAX: u64 = 16 << 20;

/// Why a page could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ScrapeError {
    /// Nobody answers there, or not in time.
    #[error("http://{address}{path}: {why}")]
    Unreachable {
        /// `host:port`.
        address: String,
        /// The page.
        path: String,
        /// What happened.
        why: String,
    },
    /// What came is not what the exporter writes.
    #[error("not metrics as this build writes them: line {line} is {found:?}")]
    Format {
        /// Which line, from 1.
        line: usize,
        /// What stands there.
        found: String,
    },
}

/// A page and how it was answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Page {
    /// The HTTP status, such as 200.
    pub status: u16,
    /// The clock of who answered, as HTTP writes it, if it said so.
    pub date: Option<String>,
    /// The text.
    pub body: String,
}

/// Reads one page of `host:port`.
///
/// # Errors
/// [`ScrapeError::Unreachable`].
pub async fn get(address: &str, path: &str, patience: Duration) -> Result<Page, ScrapeError> {
    let unreachable =
        |why: String| ScrapeError::Unreachable { address: address.to_owned(), path: path.to_owned(), why };
    let asked = async {
        let mut stream = TcpStream::connect(address).await?;
        // Version 1.0: the answer ends with the connection.
        let request = format!("GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(PAGE_BYTES_MAX).read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = match timeout(patience, asked).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(wrong)) => return Err(unreachable(wrong.to_string())),
        Err(_) => return Err(unreachable(format!("no answer within {patience:?}"))),
    };
    page(&String::from_utf8_lossy(&answer)).ok_or_else(|| unreachable("what answers does not speak HTTP".to_owned()))
}

fn page(answer: &str) -> Option<Page> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.")?.split_whitespace().nth(1)?.parse().ok()?;
    let mut fields = head.lines().filter_map(|line| line.split_once(':'));
    let date = fields.find(|(name, _)| name.eq_ignore_ascii_case("date")).map(|(_, date)| date.trim().to_owned());
    Some(Page { status, date, body: body.to_owned() })
}

/// Metrics of one process at one time.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Scrape {
    /// Kind by name.
    kinds: BTreeMap<String, String>,
    samples: Vec<Sample>,
}

#[derive(Clone, PartialEq, Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Sample {
    fn has(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(name, value)| self.labels.get(*name).is_some_and(|it| it == value))
    }
}

impl Scrape {
    /// Reads the metrics of the process at `host:port`.
    ///
    /// # Errors
    /// [`ScrapeError`].
    pub async fn of(address: &str, patience: Duration) -> Result<Self, ScrapeError> {
        let page = get(address, "/metrics", patience).await?;
        if page.status != 200 {
            let why = format!("answered with status {}", page.status);
            return Err(ScrapeError::Unreachable { address: address.to_owned(), path: "/metrics".to_owned(), why });
        }
        Self::parse(&page.body)
    }

    /// Understands the text format.
    ///
    /// # Errors
    /// [`ScrapeError::Format`].
    pub fn parse(text: &str) -> Result<Self, ScrapeError> {
        let mut scrape = Self::default();
        for (line, found) in (1..).zip(text.lines()) {
            let wrong = || ScrapeError::Format { line, found: found.to_owned() };
            if let Some(kind) = found.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').ok_or_else(wrong)?;
                scrape.kinds.insert(name.to_owned(), kind.to_owned());
            } else if !found.is_empty() && !found.starts_with('#') {
                scrape.samples.push(sample(found).ok_or_else(wrong)?);
            }
        }
        Ok(scrape)
    }

    /// The names of all metrics, in order.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.kinds.keys().map(String::as_str).collect()
    }

    /// The sum of all series of a name that carry these labels; 0 if there is none.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        // An empty sum would be -0.
        self.with(name, labels).map(|sample| sample.value).fold(0.0, |sum, value| sum + value)
    }

    /// The value of the first series of a name that carries these labels.
    #[must_use]
    pub fn first(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.with(name, labels).next().map(|sample| sample.value)
    }

    /// The values of a label over all series of a name.
    #[must_use]
    pub fn label_values(&self, name: &str, label: &str) -> Vec<&str> {
        let mut values: Vec<&str> =
            self.with(name, &[]).filter_map(|sample| sample.labels.get(label).map(String::as_str)).collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    /// Samples of a histogram by upper bound: how many were at most that, ascending, the last one all.
    #[must_use]
    pub fn buckets(&self, name: &str, labels: &[(&str, &str)]) -> Vec<(f64, f64)> {
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for sample in self.with(&format!("{name}_bucket"), labels) {
            let Some(bound) = sample.labels.get("le").and_then(|bound| bound.parse::<f64>().ok()) else { continue };
            match buckets.iter_mut().find(|(it, _)| *it == bound) {
                Some((_, count)) => *count += sample.value,
                None => buckets.push((bound, sample.value)),
            }
        }
        buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
        buckets
    }

    fn with<'a>(&'a self, name: &str, labels: &[(&str, &str)]) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| sample.name == name && sample.has(labels))
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (series, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let Some((name, rest)) = series.split_once('{') else {
        return Some(Sample { name: series.to_owned(), labels: BTreeMap::new(), value });
    };
    let mut rest = rest.strip_suffix('}')?;
    let mut labels = BTreeMap::new();
    while !rest.is_empty() {
        let (label, quoted) = rest.split_once("=\"")?;
        let (text, after) = unquote(quoted)?;
        labels.insert(label.to_owned(), text);
        rest = after.strip_prefix(',').unwrap_or(after);
    }
    Some(Sample { name: name.to_owned(), labels, value })
}

/// The text up to the closing quotation mark, and what follows it.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((text, &quoted[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => text.push('\n'),
                other => text.push(other),
            },
            other => text.push(other),
        }
    }
    None
}

/// The value below which this share of samples lies, by the buckets of two scrapes (what came between them); none if there were no samples.
/// Linear within a bucket, as Prometheus reckons; samples beyond the last bound count as that bound.
#[must_use]
pub fn quantile(share: f64, before: &[(f64, f64)], now: &[(f64, f64)]) -> Option<f64> {
    let earlier = |bound: f64| before.iter().find(|(it, _)| *it == bound).map_or(0.0, |(_, count)| *count);
    let between: Vec<(f64, f64)> = now.iter().map(|(bound, count)| (*bound, count - earlier(*bound))).collect();
    let all = between.last()?.1;
    if all <= 0.0 {
        return None;
    }
    let rank = share * all;
    let (mut low, mut below) = (0.0, 0.0);
    for (bound, count) in between {
        if count >= rank {
            if bound.is_infinite() {
                return Some(low);
            }
            return Some(low + (bound - low) * (rank - below) / (count - below));
        }
        (low, below) = (bound, count);
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# HELP a_total Things.
# TYPE a_total counter
a_total{kind=\"one\",what=\"a \\\"b\\\", c\"} 3
a_total{kind=\"two\"} 4

# HELP h_seconds Times.
# TYPE h_seconds histogram
h_seconds_bucket{le=\"0.1\"} 2
h_seconds_bucket{le=\"0.5\"} 4
h_seconds_bucket{le=\"+Inf\"} 4
h_seconds_sum 0.9
h_seconds_count 4
";

    #[test]
    fn series_are_found_by_their_labels_and_summed() {
        let scrape = Scrape::parse(TEXT).unwrap();
        assert_eq!(scrape.names(), ["a_total", "h_seconds"]);
        assert_eq!(scrape.sum("a_total", &[]), 7.0);
        assert_eq!(scrape.sum("a_total", &[("what", "a \"b\", c")]), 3.0);
        assert_eq!(scrape.first("a_total", &[("kind", "two")]), Some(4.0));
        assert_eq!(scrape.first("a_total", &[("kind", "three")]), None);
        assert_eq!(scrape.sum("b_total", &[]), 0.0);
        assert_eq!(scrape.label_values("a_total", "kind"), ["one", "two"]);
        assert_eq!(scrape.buckets("h_seconds", &[]), [(0.1, 2.0), (0.5, 4.0), (f64::INFINITY, 4.0)]);
    }

    #[test]
    fn what_is_not_the_format_is_refused_with_its_line() {
        for (text, at) in [("a", 1), ("a 1\nb{c=\"d} 1", 2), ("a one", 1), ("# TYPE a", 1), ("a{b} 1", 1)] {
            let wrong = Scrape::parse(text).unwrap_err();
            assert!(matches!(wrong, ScrapeError::Format { line, .. } if line == at), "{text:?}: {wrong}");
        }
    }

    #[test]
    fn a_quantile_is_reckoned_from_what_came_between_two_scrapes() {
        let before = [(1.0, 10.0), (2.0, 10.0), (f64::INFINITY, 10.0)];
        let now = [(1.0, 12.0), (2.0, 14.0), (f64::INFINITY, 14.0)];
        assert_eq!(quantile(0.5, &before, &now), Some(1.0));
        assert_eq!(quantile(0.75, &before, &now), Some(1.5));
        assert_eq!(quantile(0.5, &now, &now), None);
        assert_eq!(quantile(0.99, &[], &[(1.0, 0.0), (f64::INFINITY, 5.0)]), Some(1.0), "beyond the last bound");
        assert_eq!(quantile(0.5, &[], &[]), None);
    }

    #[test]
    fn an_answer_is_taken_apart_into_status_and_body() {
        let answer = "HTTP/1.0 503 Service Unavailable\r\ncontent-length: 3\r\n\r\nno\n";
        assert_eq!(page(answer), Some(Page { status: 503, date: None, body: "no\n".to_owned() }));
        let dated = page("HTTP/1.1 200 OK\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n").unwrap();
        assert_eq!(dated.date.as_deref(), Some("Sun, 06 Nov 1994 08:49:37 GMT"));
        assert_eq!(page("SSH-2.0-OpenSSH\r\n"), None);
    }

    #[tokio::test]
    async fn nobody_at_the_address_is_an_error_that_names_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let said = get(&address, "/livez", Duration::from_secs(5)).await.unwrap_err().to_string();
        assert!(said.contains(&address) && said.contains("/livez"), "{said}");
    }
}
