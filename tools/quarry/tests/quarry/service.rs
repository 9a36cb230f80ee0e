//! What a service manager hears: `NOTIFY_SOCKET`, as systemd gives it to units of `Type=notify`.

use crate::{DEADLINE, eventually, quarry};
use quarry::{
    admin::{self, BootstrapPlan},
    local::{LocalCluster, LocalSpec, Member, PARENT_VARIABLE},
    scrape::get,
};
use std::{
    cell::RefCell,
    io,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::Duration,
};

const ASK: Duration = Duration::from_secs(10);

/// A service manager with one service.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    heard: RefCell<Vec<String>>,
}

impl Manager {
    fn new(dir: &Path, name: &str) -> Self {
        let path = dir.join(name);
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, path, heard: RefCell::default() }
    }

    /// All that was said so far.
    fn heard(&self) -> Vec<String> {
        let mut buffer = [0; 4096];
        loop {
            match self.socket.recv(&mut buffer) {
                Ok(length) => self.heard.borrow_mut().push(String::from_utf8(buffer[..length].to_vec()).unwrap()),
                Err(wrong) if wrong.kind() == io::ErrorKind::WouldBlock => return self.heard.borrow().clone(),
                Err(wrong) => panic!("{wrong}"),
            }
        }
    }

    /// The first message with this line, waited for.
    async fn hears(&self, line: &str) -> String {
        let found = || self.heard().into_iter().find(|message| message.lines().any(|it| it == line));
        eventually(&format!("{line} in {:?}", self.path), found).await
    }

    fn was_told(&self, line: &str) -> bool {
        self.heard().iter().any(|message| message.lines().any(|it| it == line))
    }
}

/// A service that ends with its test.
struct Service(Child);

impl Service {
    fn start(cluster: &LocalCluster, member: Member, manager: &Manager) -> Self {
        let mut command = quarry();
        command.arg(if matches!(member, Member::Meta(_)) { "meta" } else { "datanode" });
        command.arg("--config").arg(cluster.member_dir(member).join("config.toml"));
        command.env(PARENT_VARIABLE, std::process::id().to_string());
        command.env("NOTIFY_SOCKET", &manager.path).env("WATCHDOG_USEC", "400000").env_remove("WATCHDOG_PID");
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    async fn ends_well(&mut self) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = eventually("the service to end", || self.0.try_wait().unwrap()).await;
        assert!(status.success(), "{status}");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _: io::Result<()> = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_service_is_ready_only_when_it_serves_and_says_that_it_stops() {
    let dir = tempfile::tempdir().unwrap();
    let spec = LocalSpec {
        metas: 1,
        data_nodes: 1,
        region_bytes: vec![16 << 20],
        ..LocalSpec::new(env!("CARGO_BIN_EXE_quarry").into())
    };
    let folder = dir.path().join("cluster");
    let cluster = LocalCluster::create(&folder, spec).unwrap();
    let (meta, data) = (cluster.metas()[0], cluster.data_nodes()[0]);
    let (of_meta, of_data) = (Manager::new(dir.path(), "meta.sock"), Manager::new(dir.path(), "data.sock"));
    let mut meta_service = Service::start(&cluster, meta, &of_meta);
    let mut data_service = Service::start(&cluster, data, &of_data);

    // A new meta node has started when it can be bootstrapped; a data node of a cluster that is not there yet has not.
    let blank = of_meta.hears("READY=1").await;
    assert!(blank.contains("STATUS=waits: ") && blank.contains("bootstrap"), "{blank}");
    of_data.hears("WATCHDOG=1").await;
    assert!(!of_data.was_told("READY=1"), "{:?}", of_data.heard());

    let plan = BootstrapPlan::read(&folder.join("bootstrap.toml")).unwrap();
    admin::bootstrap(&plan, cluster.trust(), DEADLINE).await.unwrap();
    assert_eq!(of_data.hears("READY=1").await, "READY=1\nSTATUS=serves\n");
    let status = admin::node_status(cluster.trust(), &cluster.address(data), ASK).await.unwrap();
    assert_eq!(get(&status.admin_address, "/readyz", ASK).await.unwrap().status, 200);
    of_meta.hears("STATUS=serves").await;

    assert!(!of_data.was_told("STOPPING=1"));
    data_service.ends_well().await;
    assert!(of_data.was_told("STOPPING=1"), "{:?}", of_data.heard());
    meta_service.ends_well().await;
    assert!(of_meta.was_told("STOPPING=1"), "{:?}", of_meta.heard());

    // One that is part of a cluster is ready when its groups are led again.
    let again = Manager::new(dir.path(), "again.sock");
    let _service = Service::start(&cluster, meta, &again);
    assert_eq!(again.hears("READY=1").await, "READY=1\nSTATUS=serves\n");
}
