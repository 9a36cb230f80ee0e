//! Values in and out, and what is there without reading them.

use crate::{Up, code, quarry, text};
use crc32c::crc32c;
use serde_json::Value;
use std::{
    ffi::{OsStr, OsString},
    fs,
    io::{Read as _, Write as _},
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

/// A cluster with a namespace, and the command on it.
struct Scene {
    _up: Up,
    dir: tempfile::TempDir,
    cluster: PathBuf,
}

impl Scene {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut up = Up::start(dir.path());
        let cluster = up.ready().await;
        let scene = Self { _up: up, dir, cluster };
        scene.done("namespace create kv --copies 1");
        scene
    }

    fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = quarry();
        command.env("QUARRY_CLUSTER", &self.cluster).env("QUARRY_NAMESPACE", "kv").args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn on(&self, line: &str) -> Output {
        self.command(line.split(' ')).output().unwrap()
    }

    /// Runs what must end well.
    fn done(&self, line: &str) -> Vec<u8> {
        let output = self.on(line);
        assert_eq!(code(&output), 0, "{line}: {}", text(&output.stderr));
        output.stdout
    }

    fn lines(&self, line: &str) -> Vec<String> {
        text(&self.done(line)).lines().map(str::to_owned).collect()
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }
}

fn rows(bytes: &[u8]) -> Vec<Value> {
    text(bytes).lines().map(|row| serde_json::from_str(row).unwrap_or_else(|_| panic!("no JSON: {row}"))).collect()
}

#[tokio::test]
async fn folders_and_files_go_in_by_name_and_come_out_as_they_were() {
    let scene = Scene::new().await;
    let bytes: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
    scene.file("tree/a.bin", &bytes);
    scene.file("tree/deep/b", b"\x00\xff\n");
    scene.file("tree/deep/empty", b"");
    scene.file("single.txt", b"single");

    let put = format!("put -v --prefix run/ --files {} x=y={}", scene.path("tree"), scene.path("single.txt"));
    let wrong = scene.on(&put);
    assert_eq!(code(&wrong), 3, "there is no file y=..");
    assert!(text(&wrong.stdout).lines().any(|row| row.starts_with("run/x: y=")), "{}", text(&wrong.stdout));
    let said = text(&wrong.stderr);
    assert!(said.contains("3 of 4 keys, ") && said.contains(" MiB/s") && said.contains("1 of 4 keys failed"), "{said}");

    scene.done(&format!("put --files {0} named={0}", scene.path("single.txt")));
    assert_eq!(scene.lines("ls"), ["named", "run/a.bin", "run/deep/b", "run/deep/empty", "single.txt"]);
    assert_eq!(scene.done("cat single.txt run/deep/b run/deep/empty named"), b"single\x00\xff\nsingle");

    let out = scene.path("out");
    let got = rows(&scene.done(&format!("get -o json -O {out} run/a.bin run/deep/b run/deep/empty")));
    assert_eq!((&got[0]["key"], &got[0]["bytes"]), (&"run/a.bin".into(), &400_000.into()));
    for name in ["a.bin", "deep/b", "deep/empty"] {
        let read = |root: &Path| fs::read(root.join(name)).unwrap();
        assert!(read(&scene.dir.path().join("out/run")) == read(&scene.dir.path().join("tree")), "{name}");
    }
    scene.done(&format!("get named -O {out}/"));
    assert_eq!(fs::read(scene.dir.path().join("out/named")).unwrap(), b"single");

    let some = scene.on("cat named none single.txt");
    assert_eq!((code(&some), &some.stdout[..]), (3, &b"singlesingle"[..]), "the others come all the same");
    assert!(text(&some.stderr).contains("none"), "{}", text(&some.stderr));
    assert_eq!(code(&scene.on("get named single.txt")), 2, "two values need a folder");

    let mut put = scene.command(["put", "--files", "piped=-"]).stdin(Stdio::piped()).spawn().unwrap();
    put.stdin.take().unwrap().write_all(b"from a pipe").unwrap();
    assert!(put.wait().unwrap().success());
    assert_eq!(scene.done("get piped"), b"from a pipe");
    let escaping = scene.on("put ../escape /dev/null");
    assert_eq!(code(&escaping), 0, "a key may be anything: {}", text(&escaping.stderr));
    assert_eq!(code(&scene.on(&format!("get -O {out}/ ../escape"))), 2, "but leads out of no folder");
    assert!(!scene.dir.path().join("escape").exists());
}

#[tokio::test]
async fn what_is_there_is_told_without_reading_it_under_keys_of_any_bytes() {
    let scene = Scene::new().await;
    for number in 0..5 {
        scene.file(&format!("tree/{number}"), &vec![number; 1000 + usize::from(number)]);
    }
    let written = rows(&scene.done(&format!("put -o json --prefix block/ --files {}", scene.path("tree"))));

    let stat = rows(&scene.done("stat -o json block/3 block/0"));
    assert_eq!((&stat[0]["key"], &stat[0]["bytes"]), (&"block/3".into(), &1003.into()));
    assert_eq!(stat[0]["version"], written[3]["version"]);
    assert_eq!(stat[0]["crc32c"], format!("{:08x}", crc32c(&[3; 1003])));
    let copies = stat[0]["copies"].as_array().unwrap();
    assert_eq!((copies.len(), &copies[0]["node"], &copies[0]["region"]), (1, &101.into(), &0.into()));
    let shown = text(&scene.done("stat block/3"));
    assert!(shown.contains("bytes    1003") && shown.contains("region 0"), "{shown}");
    let some = scene.on("stat -o json block/1 none");
    assert_eq!(code(&some), 3);
    assert_eq!(rows(&some.stdout)[1]["error"]["code"], "not_found");

    assert_eq!(scene.lines("ls block/ --limit 2"), ["block/0", "block/1"]);
    assert_eq!(scene.lines("ls block/ --after block/2"), ["block/3", "block/4"]);
    assert!(scene.lines("ls other/").is_empty());
    let long = scene.lines("ls -l block/4");
    assert!(long[0].contains("1004") && long[0].ends_with("block/4"), "{long:?}");
    assert_eq!(rows(&scene.done("ls -o json --limit 1"))[0]["bytes"], 1000);

    assert_eq!(scene.lines("exists block/0 block/1"), ["2"]);
    let run = scene.on("exists -o json block/0 none block/1");
    assert_eq!(code(&run), 3);
    let told = &rows(&run.stdout)[0];
    assert_eq!((&told["run"], &told["of"], &told["first_missing"]["key"]), (&1.into(), &3.into(), &"none".into()));

    let binary = OsString::from_vec(b"z\xff\n\\".to_vec());
    for key in [OsStr::new("zürich/鍵"), &binary] {
        let put = scene.command([OsStr::new("put"), key, OsStr::new("/dev/null")]).output().unwrap();
        assert_eq!(code(&put), 0, "{}", text(&put.stderr));
    }
    assert_eq!(scene.lines("ls z"), ["zürich/鍵", "z\\xff\\x0a\\\\"]);
    let listed = rows(&scene.done("ls -o json z"));
    assert_eq!((&listed[1]["key"], &listed[1]["key_hex"]), (&Value::Null, &"7aff0a5c".into()));
    assert_eq!(scene.lines("ls --key-hex 7aff"), ["7aff0a5c"]);
    scene.done("rm --key-hex 7aff0a5c");
    assert!(scene.lines("ls --key-hex 7aff").is_empty());
}

#[tokio::test]
async fn a_reader_that_goes_away_ends_a_listing_and_a_cat_without_an_error() {
    let scene = Scene::new().await;
    scene.file("value", &[7; 300_000]);
    let name = scene.path("value");
    scene.done(&format!("put --files 0={name} 1={name} 2={name} 3={name}"));
    for line in ["cat 0 1 2 3", "ls", "stat 0 1 2 3"] {
        let mut child = scene.command(line.split(' ')).spawn().unwrap();
        child.stdout.take().unwrap().read_exact(&mut [0; 1]).unwrap();
        let ended = child.wait_with_output().unwrap();
        assert_eq!((code(&ended), text(&ended.stderr)), (0, String::new()), "{line}");
    }
}
