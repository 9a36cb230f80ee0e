//! Regions: the lives of data nodes' memory, and where it can be reached.
//! Keeps *Epochs only grow*: an incarnation is raised at each new life and each death; a record is taken only in the present life, with an
//! epoch that is not below the one held.

use super::{
    Directory,
    extents::Lending,
    feed::{RegionState, Topic},
    nodes::{Numbered, Standing},
};
use quarry_wire::{
    certificate::Role,
    ids::{ExtentId, ExtentIndex, FeedNumber, Incarnation, LendNumber, NodeId, RegionEpoch, RegionId, RegionIndex},
    limits::{
        EXTENT_BYTES, EXTENTS_PER_SMALL_REGION, FABRIC_ADDRESS_BYTES_MAX, FRAME_ALIGN, PROVIDER_NAME_BYTES_MAX,
        REGION_BYTES_FULL, REGION_BYTES_MAX, REGION_BYTES_MIN, extent_bytes,
    },
    region::RegionRecord,
    signed::Signed,
};
use serde::{Deserialize, Serialize};

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct RegionEntry {
    pub(super) state: RegionState,
    /// Random number of the life that registered; the same one again is the same registration.
    pub(super) life: u128,
    /// The newest record of the present life.
    pub(super) record: Option<Numbered<RegionRecord>>,
    pub(super) changed: FeedNumber,
}

/// A region with all that the directory knows of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region<'a> {
    /// Life, length, whether it is up.
    pub state: RegionState,
    /// Its newest record in this life.
    pub record: Option<&'a Signed<RegionRecord>>,
    /// Number of the last change of its life in the feed.
    pub changed: FeedNumber,
    /// Number of its record in the feed.
    pub recorded: Option<FeedNumber>,
}

/// Why a region was not registered, or its record not taken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum RegionRefusal {
    /// The cluster was not initialised yet.
    #[error("the cluster is not initialised")]
    NotInitialised,
    /// The node has no certificate as a data node.
    #[error("no certificate that holds names {node} as a data node: admit one first")]
    UnknownNode {
        /// The node named.
        node: NodeId,
    },
    /// No region has this length.
    #[error(
        "a region has {REGION_BYTES_MIN} to {REGION_BYTES_MAX} bytes, a multiple of {step} at that size, not {found}"
    )]
    Length {
        /// What the length must be a multiple of.
        step: u64,
        /// The length named.
        found: u64,
    },
    /// The region has another length: extents lie where the length puts them.
    #[error(
        "{region} was registered with {expected} bytes, not {found}: give a region of another length another index"
    )]
    LengthChanged {
        /// The region.
        region: RegionId,
        /// Its length.
        expected: u64,
        /// The length named.
        found: u64,
    },
    /// The region was never registered.
    #[error("{region} is not registered")]
    UnknownRegion {
        /// The region named.
        region: RegionId,
    },
    /// The record is of another life.
    #[error("{region} is in {expected} (up: {up}), the record is of {found}: register again")]
    StaleIncarnation {
        /// The region.
        region: RegionId,
        /// Its life.
        expected: Incarnation,
        /// Whether it is up.
        up: bool,
        /// The life named.
        found: Incarnation,
    },
    /// The record is older than the one held, or another of the same epoch.
    #[error("a record of {held} is held, this one is of {found}: raise the epoch at each registration")]
    StaleEpoch {
        /// Epoch held.
        held: RegionEpoch,
        /// Epoch named.
        found: RegionEpoch,
    },
    /// The record has a field that no record can have.
    #[error("the record's {field} has {found} bytes")]
    Field {
        /// Which field.
        field: String,
        /// How many bytes.
        found: usize,
    },
    /// The node was forgotten.
    #[error("{node} was forgotten, and a number is never used again: give the node a new one")]
    Retired {
        /// The node.
        node: NodeId,
    },
    /// The node was decommissioned.
    #[error("{node} is decommissioned: take that back first, or stop it")]
    Decommissioned {
        /// The node.
        node: NodeId,
    },
    /// The keyring does not believe it.
    #[error("not believed: {why}")]
    Untrusted {
        /// What the keyring says.
        why: String,
    },
    /// The number is a meta node's.
    #[error("{node} is or was a meta node: give the data node a number of its own")]
    MetaNode {
        /// The node.
        node: NodeId,
    },
}

/// What the length of a region of about `bytes` must be a multiple of, so that its extents can be cut into slots.
const fn length_step(bytes: u64) -> u64 {
    if bytes >= REGION_BYTES_FULL { EXTENT_BYTES } else { EXTENTS_PER_SMALL_REGION * FRAME_ALIGN as u64 }
}

impl Directory {
    pub(super) fn register_region(
        &mut self,
        node: NodeId,
        index: RegionIndex,
        bytes: u64,
        life: u128,
    ) -> Result<Incarnation, RegionRefusal> {
        if self.cluster.is_none() {
            return Err(RegionRefusal::NotInitialised);
        }
        if self.is_retired(node) {
            return Err(RegionRefusal::Retired { node });
        }
        if !self.is_certified(node, Role::DataNode) {
            return Err(RegionRefusal::UnknownNode { node });
        }
        if self.was_certified(node, Role::Meta) {
            return Err(RegionRefusal::MetaNode { node });
        }
        if self.node(node).is_some_and(|held| held.standing == Standing::Decommissioned) {
            return Err(RegionRefusal::Decommissioned { node });
        }
        let step = length_step(bytes);
        if !(REGION_BYTES_MIN..=REGION_BYTES_MAX).contains(&bytes) || !bytes.is_multiple_of(step) {
            return Err(RegionRefusal::Length { step, found: bytes });
        }
        let region = RegionId { node, index };
        let Some(held) = self.regions.get(&region) else {
            let incarnation = Incarnation::new(self.generation(), 1);
            let changed = self.touch(Topic::Region(region), None);
            let state = RegionState { region, incarnation, bytes, up: true };
            self.regions.insert(region, RegionEntry { state, life, record: None, changed });
            let extents = u32::try_from(bytes / extent_bytes(bytes)).expect("REGION_BYTES_MAX has few extents");
            for index in (0..extents).map(ExtentIndex) {
                let extent = ExtentId { region, index };
                let changed = self.touch(Topic::Extent(extent), None);
                self.extents.insert(extent, Lending { lend: LendNumber::default(), shard: None, changed });
            }
            return Ok(incarnation);
        };
        if held.state.bytes != bytes {
            return Err(RegionRefusal::LengthChanged { region, expected: held.state.bytes, found: bytes });
        }
        if held.state.up && held.life == life {
            return Ok(held.state.incarnation);
        }
        Ok(self.new_life(region, Some(life)))
    }

    /// Ends the region's life: raises its incarnation and forgets its record. With `life` it is up again, as that life.
    pub(super) fn new_life(&mut self, region: RegionId, life: Option<u128>) -> Incarnation {
        let generation = self.generation();
        let held = self.regions.get(&region).expect("callers name a region that is registered");
        let old = held.changed;
        let record = held.record.as_ref().map(|record| record.changed);
        let incarnation = Incarnation::new(generation, held.state.incarnation.0.number + 1);
        if let Some(record) = record {
            self.index.remove(&record);
        }
        let changed = self.touch(Topic::Region(region), Some(old));
        let held = self.regions.get_mut(&region).expect("it was there above");
        assert!(incarnation > held.state.incarnation, "an incarnation only grows");
        held.state.incarnation = incarnation;
        held.state.up = life.is_some();
        held.life = life.unwrap_or(held.life);
        held.record = None;
        held.changed = changed;
        incarnation
    }

    /// Removes the node's regions and extents, of which none may be up.
    pub(super) fn forget_regions(&mut self, node: NodeId) {
        let gone: Vec<RegionId> = self.regions_of(node).map(|it| it.state.region).collect();
        for region in gone {
            let held = self.regions.remove(&region).expect("it was found there");
            assert!(!held.state.up, "a region that is up is not forgotten");
            self.index.remove(&held.changed);
            if let Some(record) = held.record {
                self.index.remove(&record.changed);
            }
            let all = ExtentId { region, index: ExtentIndex(0) }..=ExtentId { region, index: ExtentIndex(u32::MAX) };
            let extents: Vec<ExtentId> = self.extents.range(all).map(|(extent, _)| *extent).collect();
            for extent in extents {
                let lending = self.extents.remove(&extent).expect("it was found there");
                self.index.remove(&lending.changed);
            }
        }
    }

    pub(super) fn record_region(&mut self, signed: &Signed<RegionRecord>) -> Result<FeedNumber, RegionRefusal> {
        let keyring = self.keyring.as_ref().ok_or(RegionRefusal::NotInitialised)?;
        let said = &signed.statement;
        let fields = [
            ("provider", said.provider.len(), PROVIDER_NAME_BYTES_MAX),
            ("address", said.address.as_bytes().len(), FABRIC_ADDRESS_BYTES_MAX),
        ];
        for (field, found, most) in fields {
            if found == 0 || found > most {
                return Err(RegionRefusal::Field { field: field.to_owned(), found });
            }
        }
        let region = said.region;
        keyring.verify(signed.clone()).map_err(|why| RegionRefusal::Untrusted { why: why.to_string() })?;
        let held = self.regions.get(&region).ok_or(RegionRefusal::UnknownRegion { region })?;
        let RegionState { incarnation: expected, bytes, up, .. } = held.state;
        if said.incarnation != expected || !up {
            return Err(RegionRefusal::StaleIncarnation { region, expected, up, found: said.incarnation });
        }
        if said.length != bytes {
            return Err(RegionRefusal::LengthChanged { region, expected: bytes, found: said.length });
        }
        let old = match &held.record {
            Some(record) if record.signed.statement == *said => return Ok(record.changed),
            Some(record) if record.signed.statement.epoch >= said.epoch => {
                return Err(RegionRefusal::StaleEpoch { held: record.signed.statement.epoch, found: said.epoch });
            }
            record => record.as_ref().map(|record| record.changed),
        };
        let changed = self.touch(Topic::Record(region), old);
        let held = self.regions.get_mut(&region).expect("it was there above");
        held.record = Some(Numbered { signed: signed.clone(), changed });
        Ok(changed)
    }

    pub(super) fn declare_dead(
        &mut self,
        node: NodeId,
        judged: &[(RegionIndex, Incarnation)],
    ) -> Result<Vec<RegionId>, RegionRefusal> {
        if self.cluster.is_none() {
            return Err(RegionRefusal::NotInitialised);
        }
        let mut voided = Vec::new();
        for (index, incarnation) in judged {
            let region = RegionId { node, index: *index };
            let held = self.regions.get(&region).ok_or(RegionRefusal::UnknownRegion { region })?;
            if held.state.up && held.state.incarnation == *incarnation && !voided.contains(&region) {
                voided.push(region);
            }
        }
        for region in &voided {
            self.new_life(*region, None);
        }
        Ok(voided)
    }

    /// All regions, by node and index.
    pub fn regions(&self) -> impl Iterator<Item = Region<'_>> {
        self.regions.values().map(RegionEntry::view)
    }

    /// The regions of `node`.
    pub fn regions_of(&self, node: NodeId) -> impl Iterator<Item = Region<'_>> {
        let all = RegionId { node, index: RegionIndex(0) }..=RegionId { node, index: RegionIndex(u32::MAX) };
        self.regions.range(all).map(|(_, held)| held.view())
    }

    /// The region of this name.
    #[must_use]
    pub fn region(&self, region: RegionId) -> Option<Region<'_>> {
        self.regions.get(&region).map(RegionEntry::view)
    }

    /// The command that declares `node` dead in the lives that it has now; none if none of its regions is up.
    #[must_use]
    pub fn plan_death(&self, node: NodeId) -> Option<super::DirectoryCommand> {
        let up = self.regions_of(node).filter(|region| region.state.up);
        let judged: Vec<_> = up.map(|region| (region.state.region.index, region.state.incarnation)).collect();
        (!judged.is_empty()).then_some(super::DirectoryCommand::DeclareDead { node, judged })
    }
}

impl RegionEntry {
    fn view(&self) -> Region<'_> {
        Region {
            state: self.state,
            record: self.record.as_ref().map(|record| &record.signed),
            changed: self.changed,
            recorded: self.record.as_ref().map(|record| record.changed),
        }
    }
}
