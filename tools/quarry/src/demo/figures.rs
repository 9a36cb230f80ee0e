//! What the demo found, in numbers: how they are computed from the servers' counters, and whether they pass.

use super::verify::Found;
use crate::output::table;
use quarry::admin::Traffic;
use serde::Serialize;

/// gRPC bytes per payload byte must be under this.
const GRPC_SHARE_MAX: f64 = 0.01;
/// That share is promised for blocks of this size and more, in rounds of this size and more: what a block costs over gRPC, some 350 bytes, does not
/// depend on its size, and heartbeats do not depend on the round.
const JUDGED_BLOCK_BYTES: u64 = 64 << 10;
const JUDGED_BYTES: u64 = 8 << 20;
const GIB: f64 = (1u64 << 30) as f64;

/// One measured span: what the servers counted in it, and the payload that moved.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(crate) traffic: Traffic,
    pub(crate) payload_bytes: u64,
    pub(crate) seconds: f64,
}

impl Span {
    /// Bytes of every gRPC message that any server got or sent: calls of clients, of data nodes among each other and to meta nodes, heartbeats
    /// and all of Raft. Each message is counted once, at its server. Calls of Admin and NodeStatus are left out: they are the measurement.
    fn grpc_bytes(&self) -> u64 {
        self.traffic.sum(|method| !is_measurement(method)).bytes
    }
    fn client_calls(&self) -> u64 {
        self.traffic.sum(is_of_clients).calls
    }
    fn gib_s(&self) -> f64 {
        self.payload_bytes as f64 / GIB / self.seconds
    }
    fn share(&self) -> f64 {
        self.grpc_bytes() as f64 / self.payload_bytes as f64
    }
}

fn is_measurement(method: &str) -> bool {
    method.contains(".Admin/") || method.ends_with("/NodeStatus")
}

/// Calls that a client makes and waits for. What data nodes ask (Confirm, Publish, the Registry) and Raft are not.
fn is_of_clients(method: &str) -> bool {
    const OF_CLIENTS: [&str; 9] = [
        ".Control/Describe",
        ".Control/CreateNamespace",
        ".Control/Grant",
        ".Control/Seal",
        ".Control/Delete",
        ".Control/Resolve",
        ".DataNode/Arm",
        ".DataNode/Commit",
        ".DataNode/Close",
    ];
    OF_CLIENTS.iter().any(|of_clients| method.ends_with(of_clients))
}

/// What was measured.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) blocks: u32,
    pub(crate) size: u64,
    /// First round: written by put_many, from connecting to closing.
    pub(crate) put: Span,
    /// First round: read by another process, from connecting to closing.
    pub(crate) get: Span,
    /// From the kill of the leader to the acknowledgement of the first batch that began after it.
    pub(crate) leaderless_ms: u64,
    /// Puts that were not acknowledged, in both rounds.
    pub(crate) unacknowledged: u64,
    /// What the readers found: round one, round two, both without a data node.
    pub(crate) found: [Found; 3],
}

/// The report: what `-o json` prints.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) blocks: u32,
    pub(crate) block_bytes: u64,
    /// Payload of one round.
    pub(crate) bytes: u64,
    pub(crate) put_gib_s: f64,
    pub(crate) get_gib_s: f64,
    pub(crate) get_gib_s_without_a_data_node: f64,
    /// Calls of the writer per block written.
    pub(crate) control_round_trips_per_block: f64,
    /// Calls of the reader per block read.
    pub(crate) control_round_trips_per_block_read: f64,
    /// Of both spans together.
    pub(crate) grpc_bytes_per_payload_byte: f64,
    pub(crate) grpc_bytes_per_payload_byte_written: f64,
    pub(crate) grpc_bytes_per_payload_byte_read: f64,
    pub(crate) leaderless_ms: u64,
    /// Blocks read back as they were written, of all that were asked for.
    pub(crate) verified: u64,
    /// Puts not acknowledged, and blocks gone, different or unreadable.
    pub(crate) lost: u64,
    /// What went wrong first.
    pub(crate) first_problem: Option<String>,
}

impl Figures {
    pub(crate) fn of(measured: &Measured) -> Self {
        let Measured { blocks, size, put, get, .. } = measured;
        let per_block = |calls: u64| calls as f64 / f64::from(*blocks);
        let both = (put.grpc_bytes() + get.grpc_bytes()) as f64 / (put.payload_bytes + get.payload_bytes) as f64;
        let found = &measured.found;
        let bad = |found: &Found| found.missing + found.different + found.failed;
        Self {
            blocks: *blocks,
            block_bytes: *size,
            bytes: u64::from(*blocks) * size,
            put_gib_s: put.gib_s(),
            get_gib_s: get.gib_s(),
            get_gib_s_without_a_data_node: found[2].bytes as f64 / GIB / found[2].seconds,
            control_round_trips_per_block: per_block(put.client_calls()),
            control_round_trips_per_block_read: per_block(get.client_calls()),
            grpc_bytes_per_payload_byte: both,
            grpc_bytes_per_payload_byte_written: put.share(),
            grpc_bytes_per_payload_byte_read: get.share(),
            leaderless_ms: measured.leaderless_ms,
            verified: found.iter().map(|found| found.good).sum(),
            lost: measured.unacknowledged + found.iter().map(bad).sum::<u64>(),
            first_problem: found.iter().find_map(|found| found.first_problem.clone()),
        }
    }

    /// What does not pass, one sentence each.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let expected = 4 * u64::from(self.blocks);
        if self.lost > 0 || self.verified != expected {
            let first = self.first_problem.as_deref().unwrap_or("a put was not acknowledged");
            problems.push(format!("{} lost, {} of {expected} verified: {first}", self.lost, self.verified));
        }
        let shares = [
            ("all", self.grpc_bytes_per_payload_byte),
            ("written", self.grpc_bytes_per_payload_byte_written),
            ("read", self.grpc_bytes_per_payload_byte_read),
        ];
        let judged = self.block_bytes >= JUDGED_BLOCK_BYTES && self.bytes >= JUDGED_BYTES;
        // A share that is not a number does not pass either.
        for (what, share) in shares
            .into_iter()
            .filter(|_| judged)
            .filter(|(_, share)| !matches!(share.partial_cmp(&GRPC_SHARE_MAX), Some(std::cmp::Ordering::Less)))
        {
            problems.push(format!("gRPC moved {:.2} % of the payload ({what}), it must be under 1 %", share * 100.0));
        }
        problems
    }

    /// For people.
    pub(crate) fn shown(&self) -> String {
        let mut shown = table(&["figure", "value", "what is counted"]);
        let percent = |share: f64| format!("{:.3} %", share * 100.0);
        let mut row = |name: &str, value: String, what: &str| {
            shown.add_row(vec![name.to_owned(), value, what.to_owned()]);
        };
        let bytes = format!(
            "{:.1} MiB in {} blocks of {} bytes",
            self.bytes as f64 / f64::from(1 << 20),
            self.blocks,
            self.block_bytes
        );
        row("payload of a round", bytes, "each block with two copies");
        row("put", format!("{:.2} GiB/s", self.put_gib_s), "payload, by put_many, acknowledged with both copies");
        row("get", format!("{:.2} GiB/s", self.get_gib_s), "payload, by get_many, in another process");
        let degraded = format!("{:.2} GiB/s", self.get_gib_s_without_a_data_node);
        row("get without a data node", degraded, "both rounds, from the other copies");
        let calls = format!("{:.4}", self.control_round_trips_per_block);
        row("control round trips per block", calls, "calls of the writer, from connecting to closing");
        let calls = format!("{:.4}", self.control_round_trips_per_block_read);
        row("the same of the reader", calls, "calls of the reader, from connecting to closing");
        let what = "all gRPC bytes at all servers: clients, data nodes, heartbeats, Raft";
        row("gRPC bytes per payload byte", percent(self.grpc_bytes_per_payload_byte), what);
        row("of writing alone", percent(self.grpc_bytes_per_payload_byte_written), "the same while writing");
        row("of reading alone", percent(self.grpc_bytes_per_payload_byte_read), "the same while reading");
        let leaderless = format!("{} ms", self.leaderless_ms);
        row("leaderless", leaderless, "kill of the leader to the next acknowledged batch begun after it");
        row(
            "verified",
            self.verified.to_string(),
            "blocks read back as written: both rounds, then again without a node",
        );
        row("lost", self.lost.to_string(), "not acknowledged, gone, different or unreadable");
        shown.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_proto::v1::MethodCounter;

    fn span(counters: &[(&str, u64, u64)], payload_bytes: u64) -> Span {
        let mut traffic = Traffic::default();
        let counter = |(method, calls, bytes): &(&str, u64, u64)| MethodCounter {
            method: (*method).to_owned(),
            calls: *calls,
            received_bytes: *bytes,
            sent_bytes: 0,
        };
        traffic.add(&counters.iter().map(counter).collect::<Vec<_>>());
        Span { traffic, payload_bytes, seconds: 0.5 }
    }

    fn measured() -> Measured {
        let found = |good| Found { good, seconds: 1.0, bytes: 1 << 30, ..Found::default() };
        let put = [
            ("/quarry.v1.Control/Grant", 4, 100),
            ("/quarry.v1.DataNode/Commit", 6, 300),
            ("/quarry.v1.DataNode/Confirm", 6, 300),
            ("/quarry.v1.Control/Publish", 6, 300),
            ("/quarry.raft.v1.Raft/Append", 50, 1000),
            ("/quarry.v1.Admin/Status", 9, 1_000_000_000),
            ("/quarry.v1.DataNode/NodeStatus", 9, 1_000_000_000),
        ];
        Measured {
            blocks: 100,
            size: (1 << 30) / 100,
            put: span(&put, 1 << 30),
            get: span(&[("/quarry.v1.Control/Resolve", 2, 48)], 1 << 30),
            leaderless_ms: 700,
            unacknowledged: 0,
            found: [found(100), found(100), found(200)],
        }
    }

    #[test]
    fn calls_of_clients_and_bytes_of_all_are_counted_and_the_measurement_is_not() {
        let figures = Figures::of(&measured());
        assert!((figures.control_round_trips_per_block - 0.1).abs() < 1e-9);
        assert!((figures.control_round_trips_per_block_read - 0.02).abs() < 1e-9);
        assert!((figures.grpc_bytes_per_payload_byte * f64::from(1u32 << 31) - 2048.0).abs() < 1e-6);
        assert!((figures.put_gib_s - 2.0).abs() < 1e-9);
        assert_eq!((figures.verified, figures.lost, figures.problems()), (400, 0, Vec::new()));
    }

    #[test]
    fn one_lost_block_or_one_percent_of_grpc_bytes_does_not_pass() {
        let mut lost = measured();
        lost.found[2].good -= 1;
        lost.found[2].failed += 1;
        assert_eq!((Figures::of(&lost).lost, Figures::of(&lost).problems().len()), (1, 1));
        let mut unread = measured();
        unread.found[0].good -= 1;
        assert_eq!(Figures::of(&unread).problems().len(), 1);
        let mut unacknowledged = measured();
        unacknowledged.unacknowledged = 1;
        assert_eq!(Figures::of(&unacknowledged).problems().len(), 1);
        let mut chatty = measured();
        chatty.get = span(&[("/quarry.v1.Control/Resolve", 2, 100)], 10_000);
        assert_eq!(Figures::of(&chatty).problems().len(), 1, "exactly 1 % does not pass");
        let mut nothing = measured();
        nothing.get.payload_bytes = 0;
        nothing.get.traffic = Traffic::default();
        assert_eq!(Figures::of(&nothing).problems().len(), 1);
    }

    #[test]
    fn the_grpc_bytes_of_small_blocks_are_shown_and_not_judged() {
        let problems = |block_bytes| {
            Figures { block_bytes, grpc_bytes_per_payload_byte: 0.5, ..Figures::of(&measured()) }.problems().len()
        };
        assert_eq!((problems(JUDGED_BLOCK_BYTES - 1), problems(JUDGED_BLOCK_BYTES)), (0, 1));
    }

    #[test]
    fn the_json_has_the_promised_names() {
        let json = serde_json::to_value(Figures::of(&measured())).unwrap();
        for name in [
            "blocks",
            "bytes",
            "put_gib_s",
            "get_gib_s",
            "control_round_trips_per_block",
            "grpc_bytes_per_payload_byte",
            "leaderless_ms",
            "lost",
        ] {
            assert!(json[name].is_number(), "{name}");
        }
    }
}
