//! Nodes come and go: changes of the meta nodes, and data nodes that are drained, decommissioned and forgotten.

use crate::directory::{Bench, UUID, certificate, extent, node_key, region, register, root};
use proptest::prelude::*;
use quarry_meta_state::{
    Directory, Shard,
    directory::{
        DirectoryCommand, DirectoryOutcome, FEED_SLICE_ENTRIES_MAX, FeedChange, Labels, MemberChange, Standing,
        members::MemberRefusal, nodes::NodeRefusal, regions::RegionRefusal,
    },
    shard::{Settings, ShardCommand, ShardOutcome},
};
use quarry_wire::{
    certificate::{Certificate, Role},
    ids::{CertificateSerial, Generation, NodeId, Ordinal, ShardId},
    units::LogTime,
};
use std::collections::BTreeSet;

fn admit_meta(node: u64) -> DirectoryCommand {
    let (serial, key) = (CertificateSerial(100 + node), node_key(node).public());
    let said = Certificate { serial, node: NodeId(node), role: Role::Meta, key };
    DirectoryCommand::AdmitCertificate(root().sign_as_root(UUID, said))
}

fn add(node: u64) -> MemberChange {
    MemberChange::Add { node: NodeId(node), address: format!("h:{node}") }
}
const fn remove(node: u64) -> MemberChange {
    MemberChange::Remove { node: NodeId(node) }
}
fn replace(old: u64, new: u64) -> MemberChange {
    MemberChange::Replace { old: NodeId(old), new: NodeId(new), address: format!("h:{new}") }
}
const fn number(number: u64) -> Ordinal {
    Ordinal { generation: Generation(1), number }
}

fn begin(bench: &mut Bench, change: MemberChange) -> Result<Ordinal, MemberRefusal> {
    member(bench.apply(DirectoryCommand::BeginChange(change)))
}
fn end(bench: &mut Bench, number: Ordinal, cancelled: bool) -> Result<Ordinal, MemberRefusal> {
    member(bench.apply(DirectoryCommand::EndChange { number, cancelled }))
}
fn member(outcome: DirectoryOutcome) -> Result<Ordinal, MemberRefusal> {
    match outcome {
        DirectoryOutcome::Member(outcome) => outcome,
        other => panic!("{other:?}"),
    }
}
fn node(outcome: DirectoryOutcome) -> Result<(), NodeRefusal> {
    match outcome {
        DirectoryOutcome::Node(outcome) => outcome.map(drop),
        other => panic!("{other:?}"),
    }
}

/// A directory with meta nodes 31 to 35 certified, and data nodes 1 and 2, which announced themselves.
fn bench() -> Bench {
    let mut bench = Bench::new(2);
    for node in 31..=35 {
        bench.apply(admit_meta(node));
    }
    for node in 1..=2 {
        bench.apply(DirectoryCommand::AnnounceNode { node: NodeId(node), address: format!("h:{node}") });
    }
    bench
}

#[test]
fn one_change_is_under_way_at_a_time_and_the_same_again_is_the_same() {
    let mut bench = bench();
    assert_eq!(begin(&mut bench, add(34)), Ok(number(1)));
    assert_eq!(begin(&mut bench, add(34)), Ok(number(1)));
    let refused = begin(&mut bench, remove(31));
    assert!(matches!(refused, Err(MemberRefusal::UnderWay { under_way }) if under_way.number == number(1)));
    assert_eq!(bench.directory.node(NodeId(34)).unwrap().address, "h:34");
    assert_eq!(end(&mut bench, number(2), false), Err(MemberRefusal::NotUnderWay { found: number(2) }));
    assert_eq!(end(&mut bench, number(1), false), Ok(number(1)));
    assert_eq!(end(&mut bench, number(1), false), Ok(number(1)), "its end, told twice");
    assert_eq!(begin(&mut bench, add(34)), Ok(number(1)), "asked for once more, it was done");
    assert_eq!(bench.directory.change_under_way(), None);
    assert_eq!(begin(&mut bench, MemberChange::Promote { node: NodeId(34) }), Ok(number(2)));
    assert_eq!(end(&mut bench, number(2), true), Ok(number(2)));
    assert_eq!(
        begin(&mut bench, MemberChange::Promote { node: NodeId(34) }),
        Ok(number(3)),
        "what was cancelled begins anew"
    );
}

#[test]
fn a_node_that_was_removed_never_comes_back() {
    let mut bench = bench();
    begin(&mut bench, add(34)).unwrap();
    end(&mut bench, number(1), false).unwrap();
    begin(&mut bench, remove(34)).unwrap();
    assert!(bench.directory.is_retired(NodeId(34)), "from the beginning of its removal");
    assert_eq!(end(&mut bench, number(2), true), Err(MemberRefusal::OnlyForward { node: NodeId(34) }));
    end(&mut bench, number(2), false).unwrap();
    assert_eq!(bench.directory.node(NodeId(34)), None);
    let retired = |refused: Result<Ordinal, MemberRefusal>| refused == Err(MemberRefusal::Retired { node: NodeId(34) });
    assert!(retired(begin(&mut bench, add(34))));
    assert!(retired(begin(&mut bench, replace(31, 34))));
    begin(&mut bench, replace(31, 35)).unwrap();
    assert!(!bench.directory.is_retired(NodeId(31)), "it may stay, if the change is cancelled");
    end(&mut bench, number(3), false).unwrap();
    assert!(bench.directory.is_retired(NodeId(31)));
    bench.apply(DirectoryCommand::RaiseGeneration { generation: Generation(2) });
    assert!(retired(begin(&mut bench, add(34))), "nor in a later generation");
    let announced = DirectoryCommand::AnnounceNode { node: NodeId(34), address: "h:9".into() };
    assert_eq!(node(bench.apply(announced)), Err(NodeRefusal::Retired { node: NodeId(34) }));
}

#[test]
fn who_is_no_meta_node_or_has_no_address_is_not_added() {
    let mut bench = bench();
    assert_eq!(begin(&mut bench, add(1)), Err(MemberRefusal::DataNode { node: NodeId(1) }));
    assert_eq!(begin(&mut bench, add(36)), Err(MemberRefusal::NotCertified { node: NodeId(36) }));
    let nowhere = MemberChange::Add { node: NodeId(34), address: String::new() };
    assert_eq!(begin(&mut bench, nowhere), Err(MemberRefusal::Address { found: 0 }));
    assert_eq!(begin(&mut bench, replace(31, 31)), Err(MemberRefusal::Same { node: NodeId(31) }));
    assert_eq!(bench.directory.change_under_way(), None);
}

#[test]
fn a_number_is_a_meta_nodes_or_a_data_nodes_and_never_both() {
    let mut bench = bench();
    // Data node 1 holds memory, data node 3 is only certified: the root says of both that they are meta nodes too.
    bench.apply(DirectoryCommand::AdmitCertificate(certificate(3)));
    for node in [1, 3] {
        bench.apply(admit_meta(node));
        let refused = Err(MemberRefusal::DataNode { node: NodeId(node) });
        assert_eq!(begin(&mut bench, add(node)), refused);
        assert_eq!(begin(&mut bench, replace(31, node)), refused);
    }
    let refused = Err(MemberRefusal::DataNode { node: NodeId(1) });
    assert_eq!(begin(&mut bench, remove(1)), refused, "its memory would be left to nobody");
    assert_eq!(begin(&mut bench, replace(1, 35)), refused);
    assert!(!bench.directory.is_retired(NodeId(1)) && bench.directory.change_under_way().is_none());
    let meta = RegionRefusal::MetaNode { node: NodeId(3) };
    assert_eq!(bench.apply(register(3, 1)), DirectoryOutcome::Region(Err(meta)));
}

#[test]
fn a_new_generation_gives_up_the_change_under_way() {
    let mut bench = bench();
    begin(&mut bench, add(34)).unwrap();
    bench.apply(DirectoryCommand::RaiseGeneration { generation: Generation(2) });
    assert_eq!(bench.directory.change_under_way(), None);
    let next = begin(&mut bench, add(35)).unwrap();
    assert!(next > number(1), "{next} counts on");
}

/// Brings the shard up to date.
fn tell(directory: &Directory, shard: &mut Shard) {
    while shard.feed_position() < directory.feed_position() {
        let slice = directory.feed_since(shard.feed_position(), FEED_SLICE_ENTRIES_MAX);
        let outcome = shard.apply(LogTime(1_000), ShardCommand::ApplyFeed(slice));
        assert!(matches!(outcome, ShardOutcome::Feed(Ok(_))), "{outcome:?}");
        shard.check().unwrap();
    }
}

#[test]
fn a_data_node_is_drained_decommissioned_and_forgotten_in_every_shard() {
    let mut bench = bench();
    let mut shard = Shard::new(ShardId(1), Settings::new(Generation(1), 2));
    for index in 0..4 {
        for node in 1..=2 {
            bench.apply(DirectoryCommand::LendExtent { extent: extent(node, index), shard: ShardId(1) });
        }
    }
    tell(&bench.directory, &mut shard);
    assert_eq!(shard.space().regions.len(), 2);
    let stand = |standing| DirectoryCommand::SetStanding { node: NodeId(1), standing };
    assert_eq!(node(bench.apply(stand(Standing::Draining))), Ok(()));
    tell(&bench.directory, &mut shard);
    assert!(shard.is_drained(NodeId(1)) && !shard.is_drained(NodeId(2)));
    assert_eq!(node(bench.apply(stand(Standing::Serving))), Ok(()));
    tell(&bench.directory, &mut shard);
    assert!(!shard.is_drained(NodeId(1)));

    let forget = DirectoryCommand::ForgetNode { node: NodeId(1) };
    assert_eq!(node(bench.apply(forget.clone())), Err(NodeRefusal::Alive { node: NodeId(1), regions: 1 }));
    assert_eq!(node(bench.apply(stand(Standing::Decommissioned))), Ok(()));
    for back in [Standing::Serving, Standing::Draining] {
        assert_eq!(
            node(bench.apply(stand(back))),
            Err(NodeRefusal::Decommissioned { node: NodeId(1) }),
            "it is for good"
        );
    }
    let down = DirectoryOutcome::Region(Err(RegionRefusal::Decommissioned { node: NodeId(1) }));
    assert_eq!(bench.apply(register(1, 2)), down);
    assert_eq!(node(bench.apply(forget.clone())), Ok(()));
    assert_eq!(node(bench.apply(forget)), Ok(()), "the same again changes nothing");
    assert_eq!(bench.directory.extents().filter(|(extent, ..)| extent.region == region(1)).count(), 0);
    // The shard hears of it all at once: it never saw the node die.
    tell(&bench.directory, &mut shard);
    assert_eq!(shard.space().regions.keys().collect::<Vec<_>>(), [&region(2)]);
    let retired = DirectoryOutcome::Region(Err(RegionRefusal::Retired { node: NodeId(1) }));
    assert_eq!(bench.apply(register(1, 3)), retired);
    assert_eq!(bench.directory.changes_since(quarry_wire::ids::FeedNumber::default()).retired, [NodeId(1)]);
    let unknown = DirectoryCommand::SetStanding { node: NodeId(9), standing: Standing::Draining };
    assert_eq!(node(bench.apply(unknown)), Err(NodeRefusal::UnknownNode { node: NodeId(9) }));
    let meta = DirectoryCommand::ForgetNode { node: NodeId(31) };
    assert_eq!(node(bench.apply(meta)), Err(NodeRefusal::UnknownNode { node: NodeId(31) }));
}

#[test]
fn a_drained_node_is_told_of_in_the_feed_once_and_a_meta_node_only_when_it_is_gone() {
    let mut bench = bench();
    begin(&mut bench, add(34)).unwrap();
    let before = bench.directory.feed_position();
    let drain = DirectoryCommand::SetStanding { node: NodeId(1), standing: Standing::Draining };
    for _ in 0..2 {
        bench.apply(drain.clone());
    }
    end(&mut bench, number(1), false).unwrap();
    begin(&mut bench, remove(34)).unwrap();
    let told = bench.directory.feed_since(before, FEED_SLICE_ENTRIES_MAX).entries;
    let told: Vec<_> = told.into_iter().map(|entry| entry.change).collect();
    let drained = FeedChange::Standing { node: NodeId(1), standing: Standing::Draining, labels: Labels::default() };
    assert_eq!(told, [drained, FeedChange::Retired(NodeId(34))]);
}

proptest! {
    /// After every step the invariants are checked by [`Bench::apply`]: numbers only grow, no change takes the place of another, nobody returns.
    #[test]
    fn whatever_is_asked_there_is_one_change_and_nobody_returns(steps in proptest::collection::vec((0..6, 31..36_u64, 31..36_u64), 0..60)) {
        let mut bench = bench();
        let mut given = BTreeSet::new();
        for (what, one, other) in steps {
            let before = bench.directory.change_under_way().cloned();
            let outcome = match what {
                0 => begin(&mut bench, add(one)),
                1 => begin(&mut bench, MemberChange::Promote { node: NodeId(one) }),
                2 => begin(&mut bench, remove(one)),
                3 => begin(&mut bench, replace(one, other)),
                _ => {
                    let named = before.as_ref().map_or_else(|| number(one), |held| held.number);
                    end(&mut bench, named, what == 5)
                }
            };
            if let Ok(found) = outcome {
                given.insert(found);
            }
            let now = bench.directory.change_under_way();
            prop_assert!(before.is_none() || now.is_none() || now == before.as_ref());
            prop_assert!(bench.directory.metas().all(|meta| !bench.directory.is_retired(meta.id)));
        }
        // Numbers are given one after the other.
        prop_assert!(given.iter().map(|it| it.number).eq(1..=given.len() as u64));
    }
}
