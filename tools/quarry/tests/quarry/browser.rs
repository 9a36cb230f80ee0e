//! The status page in a real browser: headless Chromium, spoken to over its debugging pipe. Skipped, with a word, where there is no Chromium.
//!
//! `QUARRY_SCREENSHOT=FILE` keeps what is seen at 1280 pixels; `cargo xtask screenshot` sets it.

use crate::{DEADLINE, eventually};
use quarry::local::{LocalCluster, LocalSpec, Report};
use quarry_client::{Client, Cluster, Key, NamespaceSpec, Options, PutItem};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

/// How long Chromium may take for one answer.
const ANSWER: Duration = Duration::from_secs(60);

struct Browser {
    child: Child,
    orders: File,
    answers: Receiver<Value>,
    said: Vec<Value>,
    session: Option<String>,
    number: u64,
}

impl Browser {
    /// None if there is no Chromium here.
    fn start(dir: &Path) -> Option<Self> {
        let found = ["chromium", "chromium-browser", "google-chrome"].into_iter().find(|name| {
            Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
        })?;
        let (orders, answers) = (dir.join("orders"), dir.join("answers"));
        for pipe in [&orders, &answers] {
            assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
        }
        // The debugging pipe is descriptors 3 and 4. No sandbox, since tests run as root in containers: it sees our own page alone.
        let script = format!(
            "exec {found} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars \
             --user-data-dir=\"$1/profile\" --remote-debugging-pipe 3<\"$1/orders\" 4>\"$1/answers\""
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh"]).arg(dir).stdin(Stdio::null());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let orders = File::options().write(true).open(orders).unwrap();
        let mut pipe = BufReader::new(File::open(answers).unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while pipe.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                message.pop();
                let Ok(said) = serde_json::from_slice(&message) else { break };
                if sender.send(said).is_err() {
                    break;
                }
                message.clear();
            }
        });
        let mut browser = Self { child, orders, answers, said: Vec::new(), session: None, number: 0 };
        let target = browser.ask("Target.createTarget", &json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.ask("Target.attachToTarget", &attach);
        browser.session = Some(session["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log"] {
            browser.ask(&format!("{domain}.enable"), &json!({}));
        }
        Some(browser)
    }

    fn ask(&mut self, method: &str, parameters: &Value) -> Value {
        self.number += 1;
        let mut order = json!({ "id": self.number, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            order["sessionId"] = session.as_str().into();
        }
        self.orders.write_all(format!("{order}\0").as_bytes()).unwrap();
        loop {
            let said = self.answers.recv_timeout(ANSWER).unwrap_or_else(|wrong| panic!("{method}: {wrong}"));
            if said["id"] == self.number {
                assert!(said["error"].is_null(), "{method}: {said}");
                return said["result"].clone();
            }
            self.said.push(said);
        }
    }

    /// The value of an expression in the page.
    fn value(&mut self, expression: &str) -> Value {
        let result = self.ask("Runtime.evaluate", &json!({ "expression": expression, "returnByValue": true }));
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// What the browser complained of: exceptions, errors in its log, breaches of the page's policy.
    fn complaints(&self) -> Vec<&Value> {
        let wrong = |said: &&Value| match said["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => said["params"]["entry"]["level"] == "error",
            _ => false,
        };
        self.said.iter().filter(wrong).collect()
    }

    fn size(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.ask("Emulation.setDeviceMetricsOverride", &size);
    }

    fn screenshot(&mut self, file: &Path) {
        self.size(1280, 200);
        let height = self.value("document.documentElement.scrollHeight").as_u64().unwrap();
        self.size(1280, u32::try_from(height).unwrap());
        let shot = self.ask("Page.captureScreenshot", &json!({ "format": "png" }));
        fs::write(file, base64(shot["data"].as_str().unwrap())).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _: io::Result<()> = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The bytes of a text in base 64.
fn base64(text: &str) -> Vec<u8> {
    let (mut bytes, mut bits, mut held) = (Vec::new(), 0_u32, 0_u32);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let digit = digits.iter().position(|it| *it == letter).unwrap();
        held = (held << 6) | u32::try_from(digit).unwrap();
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from((held >> bits) & 0xff).unwrap());
        }
    }
    bytes
}

/// Writes and deletes in a namespace of its own until it is dropped.
async fn load(cluster: Cluster, worker: usize) {
    let client = Client::connect(cluster, Options::default()).await.unwrap();
    let blocks = client.create_namespace(NamespaceSpec::cache(format!("blocks-{worker}"))).await.unwrap();
    for round in 0_usize.. {
        // What fails here is tried again by the next round.
        let item = |part: usize| {
            let key = Key::new(format!("block-{round}-{part}")).unwrap();
            PutItem::create(key, vec![7; 1_000 * (1 + (round + part) % 60)])
        };
        let _ = blocks.put_many((0..16).map(item).collect()).await;
        if round % 3 == 0 {
            let _ = blocks.delete(format!("block-{}-0", round / 2)).await;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_browser_shows_the_cluster_and_takes_nothing_for_markup() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut browser) = Browser::start(dir.path()) else {
        eprintln!("Chromium is not installed: the page is not looked at here");
        return;
    };
    let kept = std::env::var_os("QUARRY_SCREENSHOT");
    let spec =
        LocalSpec { region_bytes: vec![48 << 20, 32 << 20], ..LocalSpec::new(env!("CARGO_BIN_EXE_quarry").into()) };
    let mut cluster = LocalCluster::create(&dir.path().join("cluster"), spec).unwrap();
    cluster.start(DEADLINE).await.unwrap();
    let mut work = tokio::task::JoinSet::new();
    for worker in 0..4 {
        work.spawn(load(Cluster::from_file(cluster.cluster_file()).unwrap(), worker));
    }
    let first = cluster.metas()[0];
    let status = cluster.status().await;
    let Report::Meta(Ok(reply)) = &status[&first] else { panic!("{status:?}") };

    browser.size(1280, 900);
    browser.ask("Page.navigate", &json!({ "url": format!("http://{}/", reply.admin_address) }));
    eventually("the page to say how the cluster is", || {
        (browser.value("document.getElementById('state')?.textContent") == "healthy").then_some(())
    })
    .await;
    let groups = browser.value("document.querySelectorAll('#groups tr').length - 1");
    assert_eq!(groups.as_u64(), Some(reply.groups.len() as u64));
    assert_eq!(browser.value("document.querySelectorAll('#memory .node').length"), 2);
    assert_eq!(browser.value("document.querySelectorAll('#memory .region .bar').length"), 4);
    assert_eq!(browser.value("document.querySelectorAll('#memory .region canvas.map').length"), 4);
    // What is on the map has the colours of the legend, and more than one of them.
    let colours = "(() => { const seen = new Set(); \
        const known = new Set([...document.querySelectorAll('#legend i')].map((it) => getComputedStyle(it).backgroundColor)); \
        for (const map of document.querySelectorAll('canvas.map')) { \
            const data = map.getContext('2d').getImageData(0, 0, map.width, Math.max(1, map.height - 1)).data; \
            for (let at = 0; at < data.length; at += 4) seen.add('rgb(' + data[at] + ', ' + data[at + 1] + ', ' + data[at + 2] + ')'); } \
        return [seen.size, [...seen].filter((it) => !known.has(it))]; })()";
    eventually("the maps to show memory in use", || {
        let seen = browser.value(colours);
        assert_eq!(seen[1], json!([]), "colours that the legend does not know");
        (seen[0].as_u64() >= Some(2)).then_some(())
    })
    .await;
    // Rates need two looks; a picture is worth a few more.
    let commits = "parseFloat(document.querySelectorAll('#rates .value')[1].textContent)";
    let looks = if kept.is_some() { 8 } else { 1 };
    eventually("the page to show commits", || {
        let seen = browser.value("trends.get('commits').length").as_u64() >= Some(looks);
        (seen && browser.value(commits).as_f64() > Some(0.0)).then_some(())
    })
    .await;
    if let Some(file) = kept {
        browser.screenshot(Path::new(&file));
    }

    // On a phone nothing is wider than the screen, but tables that scroll by themselves.
    browser.size(390, 800);
    assert!(browser.value("document.documentElement.scrollWidth").as_u64() <= Some(390));

    // Whatever nodes call themselves is text.
    let poisoned = "const bad = '<img src=x onerror=alert(1)><script>alert(2)</scr' + 'ipt>'; \
        draw({ node: 1, cluster: bad, generation: 1, build: bad, shards: [], \
               groups: [{ group: 1, leader: null, term: 1, committed: 1, members: [{ node: 1, role: bad, lag: 0, applied: 1 }] }], \
               metas: [{ node: 1, address: bad, build: bad, error: bad, counters: null, counters_error: bad }], \
               data_nodes: [{ node: 101, address: bad, alive: false, silent_ms: 1, labels: { [bad]: bad }, \
                              regions: [{ index: 0, incarnation: bad, bytes: 1, space: {} }] }] }, performance.now())";
    browser.value(&format!("(() => {{ {poisoned}; }})()"));
    assert_eq!(browser.value("document.querySelectorAll('img, body script, table script').length"), 0);
    assert!(browser.value("document.body.textContent.includes('onerror=alert(1)')") == true);
    assert_eq!(browser.value("document.getElementById('state').textContent"), "unavailable");

    assert!(browser.complaints().is_empty(), "{:?}", browser.complaints());
    // A node that is gone is told, too.
    drop(cluster);
    eventually("the page to say that nobody answers", || {
        (browser.value("document.getElementById('state').textContent") == "this node does not answer").then_some(())
    })
    .await;
}
