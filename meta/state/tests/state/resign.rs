//! Batches that their node signs again.

use crate::bench::{Bench, GEN, SPACE, TTL, attested, entry, key};
use quarry_meta_state::{
    entry as log_entry,
    shard::{BatchRef, Mode, Resigned, ShardCommand, ShardOutcome},
};
use quarry_wire::{
    ids::{CertificateSerial, Generation, NodeId, Ordinal},
    limits::{COMMAND_BYTES_MAX, RESIGNED_PER_CALL_MAX},
    signed::Signature,
};

const NEW: CertificateSerial = CertificateSerial(50);

fn batch_at(bench: &Bench, name: &str, node: u64) -> BatchRef {
    let found = bench.shard.resolve(SPACE, &key(name)).unwrap();
    found.copies.iter().find(|copy| copy.region.node == NodeId(node)).unwrap().batch
}

fn resigned(bench: &Bench, batch: BatchRef) -> Resigned {
    let root = bench.shard.batch(batch).unwrap().signed().statement.root;
    Resigned { batch, root, generation: GEN, serial: NEW, signature: Signature([7; 64]) }
}

fn resign(bench: &mut Bench, node: u64, batches: Vec<Resigned>) -> u32 {
    match bench.apply(ShardCommand::Resign { node: NodeId(node), batches }) {
        ShardOutcome::Resign { taken } => taken,
        other => panic!("{other:?}"),
    }
}

fn signed_otherwise(bench: &Bench, node: u64, after: u64) -> Vec<BatchRef> {
    bench.shard.signed_otherwise(NodeId(node), NEW, BatchRef(after)).collect()
}

#[test]
fn a_batch_signed_again_has_the_new_signature_over_what_was_said() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(4);
    for slot in 0..3 {
        bench.commit(&grant, entry(slot, &format!("k{slot}"), 5, Mode::Create)).unwrap();
    }
    let all: Vec<BatchRef> = (0..3).map(|slot| batch_at(&bench, &format!("k{slot}"), 1)).collect();
    assert_eq!(signed_otherwise(&bench, 1, 0), all);
    assert_eq!(signed_otherwise(&bench, 1, all[0].0), all[1..]);
    let before = bench.shard.batch(all[1]).unwrap().signed().clone();
    let again = resigned(&bench, all[1]);
    assert_eq!(resign(&mut bench, 1, vec![again.clone()]), 1);
    let now = bench.shard.batch(all[1]).unwrap().signed().clone();
    assert_eq!((now.statement, now.generation), (before.statement, before.generation));
    assert_eq!((now.serial, now.signature), (NEW, again.signature));
    assert_eq!(signed_otherwise(&bench, 1, 0), [all[0], all[2]]);
    // What the other holder signed is as it was.
    let theirs = bench.shard.batch(batch_at(&bench, "k1", 2)).unwrap().signed().clone();
    assert_eq!((theirs.serial, theirs.signature), (attested(2).serial, attested(2).signature));
    let found = bench.shard.resolve(SPACE, &key("k1")).unwrap();
    for copy in &found.copies {
        let descriptor = bench.shard.descriptor(&found, copy).unwrap();
        assert!(descriptor.proven_by(bench.shard.batch(copy.batch).unwrap().signed()));
    }
    bench.drain();
}

#[test]
fn a_signature_that_is_not_over_this_batch_of_this_node_takes_no_place() {
    let mut bench = Bench::new(2);
    let grant = bench.grant(4);
    bench.commit(&grant, entry(0, "a", 5, Mode::Create)).unwrap();
    let batch = batch_at(&bench, "a", 1);
    let good = resigned(&bench, batch);
    let before = bench.shard.batch(batch).unwrap().signed().clone();
    let wrong = vec![
        Resigned { root: [9; 32], ..good.clone() },
        Resigned { generation: Generation(GEN.0 + 1), ..good.clone() },
        Resigned { batch: BatchRef(1_000), ..good.clone() },
        Resigned { batch: batch_at(&bench, "a", 2), ..good.clone() },
    ];
    assert_eq!(resign(&mut bench, 1, wrong), 0);
    assert_eq!(resign(&mut bench, 2, vec![good.clone()]), 0, "that is another node's batch");
    assert_eq!(*bench.shard.batch(batch).unwrap().signed(), before);
    bench.delete("a").unwrap();
    assert_eq!(resign(&mut bench, 1, vec![good]), 0, "the batch went with its last value");
    bench.drain();
}

#[test]
fn a_grant_awaits_its_holders_statements_as_long_as_a_slot_is_granted_there() {
    let mut bench = Bench::new(2);
    let first = bench.grant(2);
    let last = bench.shard.last_grant();
    assert_eq!(last, first.id.sequence);
    let later = bench.grant(2);
    let awaiting = |bench: &Bench, last: Ordinal| bench.shard.awaiting(NodeId(1), last);
    assert_eq!(awaiting(&bench, last), 1, "the later one is not meant");
    assert_eq!(awaiting(&bench, later.id.sequence), 2);
    assert_eq!(bench.shard.awaiting(NodeId(9), later.id.sequence), 0);
    for slot in 0..2 {
        assert_eq!(awaiting(&bench, last), 1);
        bench.commit(&first, entry(slot, &format!("k{slot}"), 5, Mode::Create)).unwrap();
    }
    assert_eq!(awaiting(&bench, last), 0, "nothing can be committed under it any more");
    bench.wait(TTL + 1);
    assert_eq!(awaiting(&bench, later.id.sequence), 0);
    bench.drain();
}

#[test]
fn as_many_as_one_call_may_carry_fit_in_one_entry() {
    let widest = Resigned {
        batch: BatchRef(u64::MAX),
        root: [255; 32],
        generation: Generation(u32::MAX),
        serial: CertificateSerial(u64::MAX),
        signature: Signature([255; 64]),
    };
    let command = ShardCommand::Resign { node: NodeId(u64::MAX), batches: vec![widest; RESIGNED_PER_CALL_MAX] };
    let bytes = log_entry::encode_command(&command).unwrap().len();
    assert!(bytes < COMMAND_BYTES_MAX - 64, "{bytes} bytes");
}
