//! Structured logs to stderr: which lines (`QUARRY_LOG`), and how they look (`--log-format`, else `QUARRY_LOG_FORMAT`).
//!
//! Each line of a daemon carries `node`, and within a call the span's `request`, `method` and `shard`. In JSON every line is one object, with
//! the line's own fields under `fields`, those of the innermost span under `span` and of all under `spans`.

use crate::{cli::LogFormat, exit::Failure};
use quarry::stderr::Stderr;
use quarry_client::NodeId;
use std::fmt;
use tracing::{Event, Subscriber};
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{self, Writer},
    },
    registry::LookupSpan,
};

/// What a daemon logs unless it is told otherwise. What consensus says of itself at info is for whoever works on it.
pub(crate) const DAEMON: &str = "info,openraft=error";
/// What a command logs unless it is told otherwise: its errors are its output.
pub(crate) const COMMAND: &str = "off";

/// Starts logging; to be called once, with the filter to use without `QUARRY_LOG`.
pub(crate) fn start(node: Option<NodeId>, usual: &str, chosen: Option<LogFormat>) -> Result<(), Failure> {
    let filter = match std::env::var("QUARRY_LOG") {
        Ok(text) => EnvFilter::try_new(&text)
            .map_err(|wrong| Failure::error(format!("QUARRY_LOG is no filter ({wrong}), found {text:?}")))?,
        Err(_) => EnvFilter::new(usual),
    };
    let format = match (chosen, std::env::var("QUARRY_LOG_FORMAT").as_deref()) {
        (Some(format), _) => format,
        (None, Ok("json")) => LogFormat::Json,
        (None, Ok("text") | Err(_)) => LogFormat::Text,
        (None, Ok(found)) => {
            return Err(Failure::error(format!("QUARRY_LOG_FORMAT must be text or json, found {found:?}")));
        }
    };
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Stderr).with_ansi(false);
    match format {
        LogFormat::Json => {
            let lines = OfNode { inner: format::format().json(), node, json: true };
            logs.fmt_fields(format::JsonFields::new()).event_format(lines).init();
        }
        LogFormat::Text => {
            logs.event_format(OfNode { inner: format::format().with_ansi(false), node, json: false }).init();
        }
    }
    Ok(())
}

/// Lines that say of which node they are.
struct OfNode<F> {
    inner: F,
    node: Option<NodeId>,
    json: bool,
}

impl<S, N, F> FormatEvent<S, N> for OfNode<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let Some(node) = self.node else { return self.inner.format_event(context, writer, event) };
        let mut line = String::new();
        self.inner.format_event(context, Writer::new(&mut line), event)?;
        match line.strip_prefix('{').filter(|_| self.json) {
            Some(rest) => write!(writer, "{{\"node\":{},{rest}", node.0),
            None => writeln!(writer, "{} node={}", line.trim_end_matches('\n'), node.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io,
        sync::{Arc, Mutex},
    };
    use tracing::{error_span, info, warn};
    use tracing_subscriber::fmt::MakeWriter;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl MakeWriter<'_> for Kept {
        type Writer = Self;
        fn make_writer(&self) -> Self {
            self.clone()
        }
    }

    fn two_lines() {
        info!(lanes = 3, "outside");
        error_span!("call", request = "abc", shard = 1).in_scope(|| warn!("inside"));
    }

    #[test]
    fn every_json_line_is_an_object_with_the_node_and_the_calls_request_and_shard() {
        let kept = Kept::default();
        let lines = OfNode { inner: format::format().json(), node: Some(NodeId(7)), json: true };
        let logs = tracing_subscriber::fmt().fmt_fields(format::JsonFields::new()).event_format(lines);
        tracing::subscriber::with_default(logs.with_writer(kept.clone()).finish(), two_lines);
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines.iter().all(|line| line["node"] == 7), "{text}");
        assert_eq!((&lines[0]["fields"]["lanes"], &lines[0]["fields"]["message"]), (&3.into(), &"outside".into()));
        assert_eq!((&lines[1]["span"]["request"], &lines[1]["span"]["shard"]), (&"abc".into(), &1.into()), "{text}");
    }

    #[test]
    fn every_text_line_ends_with_the_node() {
        let kept = Kept::default();
        let lines = OfNode { inner: format::format().with_ansi(false), node: Some(NodeId(7)), json: false };
        let logs = tracing_subscriber::fmt().with_ansi(false).event_format(lines).with_writer(kept.clone()).finish();
        tracing::subscriber::with_default(logs, two_lines);
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().filter(|line| line.ends_with(" node=7")).count(), 2, "{text}");
        assert!(text.contains("request=\"abc\"") && text.contains("outside lanes=3"), "{text}");
    }
}
