//! Cables: endpoints with memory, and peer processes.

use quarry_fabric::{
    Access, DoubleNetwork, Endpoint, EndpointConfig, FabricAddress, LocalSpan, Memory, Provider, Registration,
    RemoteSpan, without_our_descriptors,
};
use std::{
    cell::RefCell,
    io::{BufRead, BufReader, Write},
    net::{IpAddr, Ipv4Addr},
    ops::Range,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};
use tokio::time::Instant;

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;
/// Far more than anything here takes, also on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn soon() -> Instant {
    Instant::now() + LONG
}

thread_local! {
    /// Set while a test runs in the double.
    static NETWORK: RefCell<Option<DoubleNetwork>> = const { RefCell::new(None) };
}

/// The real provider, or the double on threads that are in one.
fn provider() -> Provider {
    NETWORK.with_borrow(|network| network.as_ref().map(Provider::double)).unwrap_or_else(|| Provider::detect().unwrap())
}

/// Runs a test, on this thread, on a network of the double.
pub(crate) fn in_the_double<R>(test: impl FnOnce(&DoubleNetwork) -> R) -> R {
    struct Back(Option<DoubleNetwork>);
    impl Drop for Back {
        fn drop(&mut self) {
            NETWORK.set(self.0.take());
        }
    }
    let network = DoubleNetwork::new(1).unwrap();
    let _back = Back(NETWORK.replace(Some(network.clone())));
    test(&network)
}

pub(crate) fn config() -> EndpointConfig {
    let bind = IpAddr::V4(Ipv4Addr::LOCALHOST);
    EndpointConfig { provider: provider(), bind, port: None, spin: Duration::ZERO }
}

pub(crate) fn open() -> Endpoint {
    Endpoint::open(config()).unwrap()
}

/// An endpoint that lends memory under a read key and a write key.
pub(crate) struct Target {
    pub(crate) endpoint: Endpoint,
    pub(crate) memory: Arc<Memory>,
    pub(crate) readable: Registration,
    pub(crate) writable: Registration,
}

impl Target {
    pub(crate) fn new(bytes: usize) -> Self {
        let endpoint = open();
        let memory = Memory::allocate(bytes).unwrap();
        let readable = endpoint.register(&memory, 0..bytes, Access::RemoteRead, Some(fresh_key())).unwrap();
        let writable = endpoint.register(&memory, 0..bytes, Access::RemoteWrite, Some(fresh_key())).unwrap();
        Self { endpoint, memory, readable, writable }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.memory.copy_to_vec(0, self.memory.len()).unwrap()
    }
}

/// Local memory of an endpoint.
pub(crate) struct Buffer {
    pub(crate) memory: Arc<Memory>,
    pub(crate) registration: Arc<Registration>,
}

impl Buffer {
    pub(crate) fn new(endpoint: &Endpoint, bytes: usize) -> Self {
        let memory = Memory::allocate(bytes).unwrap();
        let registration = Arc::new(endpoint.register(&memory, 0..bytes, Access::Local, None).unwrap());
        Self { memory, registration }
    }

    pub(crate) fn filled(endpoint: &Endpoint, bytes: usize, byte: u8) -> Self {
        let buffer = Self::new(endpoint, bytes);
        buffer.memory.copy_in(0, &vec![byte; bytes]).unwrap();
        buffer
    }

    pub(crate) fn span(&self, range: Range<usize>) -> LocalSpan {
        LocalSpan::new(&self.registration, range).unwrap()
    }

    pub(crate) fn whole(&self) -> LocalSpan {
        self.span(0..self.memory.len())
    }
}

/// A key that no other registration of this process has, and that is not near any other.
pub(crate) fn fresh_key() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut mixed = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 31)
}

/// Bytes that differ at every place and for every seed.
pub(crate) fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9) >> 13).to_le_bytes()[0]).collect()
}

/// Polls until `what` gives something.
pub(crate) fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = soon();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < deadline, "never came: {what}");
        std::thread::yield_now();
    }
}

/// Polls without keeping the runtime's thread.
pub(crate) async fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = soon();
    while !condition() {
        assert!(Instant::now() < deadline, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A `fabric-peer` process; killed when dropped.
pub(crate) struct PeerProcess {
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
    pub(crate) address: FabricAddress,
    base: u64,
    read_key: u64,
    write_key: u64,
}

impl PeerProcess {
    pub(crate) fn start(bytes: usize, port: Option<u16>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fabric-peer"));
        command.arg(bytes.to_string()).args(port.map(|port| port.to_string()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = without_our_descriptors(&mut command).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let ready = lines.recv_timeout(LONG).expect("the peer says that it is ready");
        let words: Vec<&str> = ready.split(' ').collect();
        let ["ready", address, base, read_key, write_key] = words.as_slice() else { panic!("{ready}") };
        let number = |word: &str| word.parse::<u64>().unwrap();
        Self {
            child,
            input,
            lines,
            address: FabricAddress::from_bytes(&hex::decode(address).unwrap()).unwrap(),
            base: number(base),
            read_key: number(read_key),
            write_key: number(write_key),
        }
    }

    pub(crate) fn readable(&self, range: Range<usize>) -> RemoteSpan {
        RemoteSpan { address: self.base + range.start as u64, key: self.read_key, len: range.len() as u64 }
    }

    pub(crate) fn writable(&self, range: Range<usize>) -> RemoteSpan {
        RemoteSpan { key: self.write_key, ..self.readable(range) }
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub(crate) fn hear(&mut self) -> String {
        self.lines.recv_timeout(LONG).expect("the peer answers")
    }

    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.hear()
    }

    /// Lets it write `length` bytes of `byte` to `remote` at `target`; the outcome comes with `hear`.
    pub(crate) fn begin_write(&mut self, target: &FabricAddress, remote: RemoteSpan, byte: u8) {
        let RemoteSpan { address, key, len } = remote;
        let target = hex::encode(target.as_bytes());
        let answer = self.ask(&format!("write {target} {address} {key} {len} {byte} {}", LONG.as_secs()));
        assert_eq!(answer, "begun");
    }

    /// Stops it; when this returns it runs no more.
    pub(crate) fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
        let stat = format!("/proc/{}/stat", self.child.id());
        wait_for("the peer stops", || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            let state = stat.rsplit(')').next().unwrap().trim_start().chars().next();
            (state == Some('T')).then_some(())
        });
    }

    pub(crate) fn go_on(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, signal).unwrap();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
