//! The demo passes, says what it promises, and leaves nothing behind.

use crate::{code, quarry, text};

#[test]
fn the_demo_loses_nothing_moves_little_over_grpc_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let output = quarry().args(["demo", "-o", "json"]).env("TMPDIR", dir.path()).output().unwrap();
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&figures["blocks"], &figures["bytes"]), (&1000.into(), &65_536_000.into()));
    assert_eq!((&figures["lost"], &figures["verified"]), (&0.into(), &4000.into()));
    let number = |name: &str| figures[name].as_f64().unwrap();
    // A thousand blocks over eight shards are mostly first slabs, which are small.
    assert!(number("control_round_trips_per_block") <= 0.1, "{figures}");
    assert!(number("grpc_bytes_per_payload_byte") < 0.01, "{figures}");
    assert!(number("put_gib_s") > 0.0 && number("get_gib_s") > 0.0 && number("leaderless_ms") > 0.0, "{figures}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name.to_string_lossy().starts_with("quarry-ports-")), "{left:?}");
}
