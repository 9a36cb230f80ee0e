//! Redis on this host, for comparison: one connection over loopback, one write per call, nothing kept on disk.
//!
//! Speaks as much of its protocol as the two calls need, and takes no reply on trust. It is a reference only where it is installed.

use super::{
    child::{Served, free_ports},
    error::BenchError,
    measure::{Round, Side},
    values::Source,
};
use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};
use tokio::time::Instant;

/// How long it may take to answer for the first time, and each call later.
const ANSWER: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);
/// Memory that it may use for values.
const MEMORY: &str = "1gb";

/// A redis-server of ours, ended when this is dropped.
#[derive(Debug)]
pub(crate) struct Redis {
    served: Served,
    address: SocketAddr,
    version: String,
}

impl Redis {
    /// Starts it; `None` where there is no redis-server.
    pub(crate) async fn start(dir: &Path) -> Result<Option<Self>, BenchError> {
        let version = match Command::new("redis-server").arg("--version").output() {
            Ok(output) => version(&String::from_utf8_lossy(&output.stdout)),
            Err(wrong) if wrong.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(wrong) => return Err(BenchError::io("redis-server")(wrong)),
        };
        let ports = free_ports(1).map_err(BenchError::io("a port for redis-server"))?;
        let (address, port) = (ports[0], ports[0].port().to_string());
        let dir = dir.to_string_lossy();
        let arguments = ["--bind", "127.0.0.1", "--port", &*port, "--save", "", "--appendonly", "no"];
        let arguments = arguments.into_iter().chain(["--maxmemory", MEMORY, "--dir", &*dir]);
        let served = Served::start("redis-server", arguments, Stdio::null());
        let served = served.map_err(BenchError::io("setpriv redis-server"))?;
        let mut redis = Self { served, address, version };
        let until = Instant::now() + ANSWER;
        while redis.connect().is_err() {
            let ended = redis.served.ended().map_err(BenchError::io("redis-server"))?;
            if ended.is_some() || Instant::now() >= until {
                let found = ended.map_or_else(|| "no answer".to_owned(), |status| format!("its end: {status}"));
                return Err(BenchError::Redis { expected: "an answer to PING".to_owned(), found });
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(Some(redis))
    }

    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    fn connect(&self) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.set_write_timeout(Some(ANSWER))?;
        stream.write_all(b"*1\r\n$4\r\nPING\r\n")?;
        let mut pong = [0; 7];
        stream.read_exact(&mut pong)?;
        if &pong == b"+PONG\r\n" { Ok(stream) } else { Err(io::Error::other("no redis-server answers here")) }
    }

    /// Sets `batch` values in a pipeline, again and again the same `batches` keys.
    pub(crate) fn set(&self, source: &Source, batch: usize, batches: usize) -> Result<Calls, BenchError> {
        let requests = (0..batches).map(|number| {
            let mut request = Vec::new();
            for at in number * batch..(number + 1) * batch {
                command(&mut request, &[b"SET", key(at).as_bytes(), &source.value(at)]);
            }
            (request, b"+OK\r\n".repeat(batch))
        });
        self.calls("SET", requests.collect(), batch)
    }

    /// Gets `batch` values in one call, of keys that [`set`](Self::set) wrote.
    pub(crate) fn get(&self, source: &Source, batch: usize, batches: usize) -> Result<Calls, BenchError> {
        let requests = (0..batches).map(|number| {
            let keys: Vec<String> = (number * batch..(number + 1) * batch).map(key).collect();
            let mut words: Vec<&[u8]> = vec![b"MGET"];
            words.extend(keys.iter().map(String::as_bytes));
            let mut request = Vec::new();
            command(&mut request, &words);
            let mut reply = format!("*{batch}\r\n").into_bytes();
            for at in number * batch..(number + 1) * batch {
                bulk(&mut reply, &source.value(at));
            }
            (request, reply)
        });
        self.calls("MGET", requests.collect(), batch)
    }

    fn calls(&self, name: &'static str, requests: Vec<(Vec<u8>, Vec<u8>)>, batch: usize) -> Result<Calls, BenchError> {
        let stream = self.connect().map_err(BenchError::io("connecting to redis-server"))?;
        Ok(Calls { name, stream, reply: Vec::new(), requests, next: 0, batch })
    }
}

/// Calls of one kind on a connection of their own, with the reply that each must have.
#[derive(Debug)]
pub(crate) struct Calls {
    name: &'static str,
    stream: TcpStream,
    reply: Vec<u8>,
    requests: Vec<(Vec<u8>, Vec<u8>)>,
    next: usize,
    batch: usize,
}

impl Calls {
    /// Makes every call once, for its effect.
    pub(crate) fn once_each(mut self) -> Result<(), BenchError> {
        for _ in 0..self.requests.len() {
            self.call()?;
        }
        Ok(())
    }

    fn call(&mut self) -> Result<Duration, BenchError> {
        let (request, expected) = &self.requests[self.next];
        self.next = (self.next + 1) % self.requests.len();
        self.reply.resize(expected.len(), 0);
        let begun = Instant::now();
        let answered = self.stream.write_all(request).and_then(|()| self.stream.read_exact(&mut self.reply));
        let took = begun.elapsed();
        answered.map_err(BenchError::io("redis-server"))?;
        if self.reply == *expected {
            return Ok(took);
        }
        let start = self.reply.get(..64).unwrap_or(&self.reply);
        let found = String::from_utf8_lossy(start).into_owned();
        Err(BenchError::Redis { expected: format!("the reply to {} that was set up", self.name), found })
    }
}

impl Side for Calls {
    async fn round(&mut self, time: Duration) -> Result<Round, BenchError> {
        tokio::task::block_in_place(|| {
            let mut round = Round::default();
            let until = Instant::now() + time;
            loop {
                let took = self.call()?;
                round.add(self.batch as f64, took);
                if Instant::now() >= until {
                    return Ok(round);
                }
            }
        })
    }
}

fn key(at: usize) -> String {
    format!("bench/{at:07}")
}

/// Adds a command to a request.
fn command(request: &mut Vec<u8>, words: &[&[u8]]) {
    request.extend(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        bulk(request, word);
    }
}

fn bulk(into: &mut Vec<u8>, bytes: &[u8]) {
    into.extend(format!("${}\r\n", bytes.len()).as_bytes());
    into.extend(bytes);
    into.extend(b"\r\n");
}

/// The number in `Redis server v=7.0.15 sha=..`.
fn version(said: &str) -> String {
    let word = said.split_whitespace().find_map(|word| word.strip_prefix("v="));
    word.unwrap_or("of unknown version").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_arrays_of_counted_strings() {
        let mut request = Vec::new();
        command(&mut request, &[b"SET", b"k", b"\r\n\0"]);
        assert_eq!(request, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3\r\n\r\n\0\r\n");
    }

    #[test]
    fn the_version_is_a_word_of_what_it_says() {
        assert_eq!(version("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64"), "7.0.15");
        assert_eq!(version("something else"), "of unknown version");
    }
}
