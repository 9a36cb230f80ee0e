//! What this node holds: its regions, the claims on them, and the endpoints that make the claims true. One lock around it (in `node.rs`) makes
//! each decision and its fence one step: nobody sees a claim closed whose lane is open.

use crate::{
    claims::{ArmPlan, ArmRefusal, Claims, Closing, ConfirmRefusal, Confirmable, NodeTime},
    lanes::{Lanes, WriteRegion},
    readers::Reader,
};
use quarry_fabric::{EndpointConfig, FabricError, Memory};
use quarry_wire::{
    grant::Grant,
    ids::{FeedNumber, Generation, GrantId, Incarnation, RegionEpoch, RegionId, RegionIndex, SlotIndex, WriterId},
    region::{FabricName, RegionRecord},
    signed::Signed,
    units::Offset,
};
use std::{collections::BTreeMap, sync::Arc};

/// Everything that the lock guards.
pub(crate) struct Holdings {
    endpoints: EndpointConfig,
    regions: BTreeMap<RegionIndex, Region>,
    claims: Claims,
    lanes: Lanes,
}

/// One region: memory that stays, and a life that does not.
struct Region {
    id: RegionId,
    memory: Arc<Memory>,
    life: Option<Life>,
}

/// A region's present incarnation.
struct Life {
    incarnation: Incarnation,
    /// The newest epoch that was begun. Only grows.
    epoch: RegionEpoch,
    /// Its reader; none between two epochs.
    reader: Option<Reader>,
    /// Where the reader listens, or the last one did.
    port: Option<u16>,
    /// The record of the newest epoch, once the directory has it.
    record: Option<Signed<RegionRecord>>,
    /// The feed number at which the directory has the record; what it said before that is about earlier lives.
    recorded: Option<FeedNumber>,
}

/// Why a grant could not be armed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArmError {
    #[error(transparent)]
    Refused(#[from] ArmRefusal),
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

impl Holdings {
    pub(crate) fn new(claims: Claims, endpoints: EndpointConfig) -> Self {
        Self { lanes: Lanes::new(endpoints.clone()), endpoints, regions: BTreeMap::new(), claims }
    }

    pub(crate) fn add_region(&mut self, id: RegionId, memory: Arc<Memory>) {
        self.regions.insert(id.index, Region { id, memory, life: None });
    }

    /// A region begins a life: opens its reader under a new key. Answers the record to sign.
    pub(crate) fn begin(&mut self, index: RegionIndex, incarnation: Incarnation) -> Result<RegionRecord, FabricError> {
        let region = self.regions.get_mut(&index).expect("regions are there from the start");
        let reader = Reader::open(&self.endpoints, &region.memory, None)?;
        let epoch = RegionEpoch(1);
        let record = record(region, incarnation, epoch, &reader, &self.endpoints)?;
        self.claims.begin(index, incarnation, region.memory.len() as u64);
        let port = reader.address().port();
        region.life = Some(Life { incarnation, epoch, reader: Some(reader), port, record: None, recorded: None });
        Ok(record)
    }

    /// The next epoch of a life: the reader of the last one, its key and all that still goes through it end, then a reader is opened under a
    /// new key. Answers the record to sign, none if that life is over. After an error the region has no reader: to be tried again.
    pub(crate) fn rotate(
        &mut self,
        index: RegionIndex,
        incarnation: Incarnation,
    ) -> Result<Option<RegionRecord>, FabricError> {
        let region = self.regions.get_mut(&index).expect("regions are there from the start");
        let Some(life) = region.life.as_mut().filter(|life| life.incarnation == incarnation) else { return Ok(None) };
        life.record = None;
        life.epoch = RegionEpoch(life.epoch.0 + 1);
        if let Some(reader) = life.reader.take() {
            reader.close();
        }
        let (epoch, port) = (life.epoch, life.port);
        let reader = Reader::open(&self.endpoints, &region.memory, port)?;
        let record = record(region, incarnation, epoch, &reader, &self.endpoints)?;
        let life = region.life.as_mut().expect("it was there above");
        life.port = reader.address().port();
        life.reader = Some(reader);
        Ok(Some(record))
    }

    /// The directory has the record from now on. False if that life is over.
    pub(crate) fn recorded(&mut self, index: RegionIndex, record: Signed<RegionRecord>, feed: FeedNumber) -> bool {
        let life = self.regions.get_mut(&index).and_then(|region| region.life.as_mut());
        let Some(life) = life.filter(|life| life.incarnation == record.statement.incarnation) else { return false };
        life.record = Some(record);
        life.recorded = Some(feed);
        true
    }

    /// Ends a region's life, if it is `incarnation`: lanes and reader are closed when it returns.
    pub(crate) fn void(&mut self, at: NodeTime, index: RegionIndex, incarnation: Incarnation) -> bool {
        let Some(region) = self.regions.get_mut(&index) else { return false };
        let Some(life) = region.life.take_if(|life| life.incarnation == incarnation) else { return false };
        let closing = self.claims.void(at, index);
        self.lanes.carry_out(&closing);
        if let Some(reader) = life.reader {
            reader.close();
        }
        true
    }

    /// The regions that have a life.
    pub(crate) fn lives(&self) -> Vec<(RegionId, Incarnation)> {
        self.regions.values().filter_map(|region| Some((region.id, region.life.as_ref()?.incarnation))).collect()
    }

    /// Whether a statement of the directory at `feed` can be about the present life of the region.
    pub(crate) fn heard_by(&self, index: RegionIndex, feed: Option<FeedNumber>) -> bool {
        let life = self.regions.get(&index).and_then(|region| region.life.as_ref());
        let Some(recorded) = life.and_then(|life| life.recorded) else { return true };
        feed.is_none_or(|feed| feed >= recorded)
    }

    /// The regions whose life belongs to a generation before `generation`.
    pub(crate) fn of_before(&self, generation: Generation) -> Vec<(RegionId, Incarnation)> {
        self.lives().into_iter().filter(|(_, life)| life.0.generation < generation).collect()
    }

    /// The present life of a region, and its record if the directory has that of its newest epoch.
    pub(crate) fn standing(&self, index: RegionIndex) -> Option<(Incarnation, Option<&Signed<RegionRecord>>)> {
        let life = self.regions.get(&index)?.life.as_ref()?;
        Some((life.incarnation, life.record.as_ref()))
    }

    /// The records that the directory has.
    pub(crate) fn records(&self) -> Vec<Vec<u8>> {
        let record = |region: &Region| Some(region.life.as_ref()?.record.as_ref()?.encode());
        self.regions.values().filter_map(record).collect()
    }

    /// Arms a grant whose signature was checked. Older claims and lanes are closed before the new write region exists.
    pub(crate) fn arm(&mut self, at: NodeTime, grant: &Arc<Grant>, writer: WriterId) -> Result<WriteRegion, ArmError> {
        let (closing, lane, opens) = match self.claims.arm(at, grant, writer)? {
            ArmPlan::Again { lane } => {
                let lent = self.lanes.lent(lane, grant.id);
                return lent.ok_or(ArmError::Refused(ArmRefusal::LaneClosed { grant: grant.id }));
            }
            ArmPlan::New { closing, lane, opens } => (closing, lane, opens),
        };
        self.lanes.carry_out(&closing);
        let opened = if opens { self.lanes.open(lane) } else { Ok(()) };
        let lent = opened.and_then(|()| {
            let holder = grant.holder(self.claims.node()).ok_or(FabricError::Closed { what: "region" })?;
            let region = self.regions.get(&holder.region.index).ok_or(FabricError::Closed { what: "region" })?;
            let span = grant.span(holder);
            let memory = &region.memory;
            self.lanes.lend(lane, grant.id, memory, place(memory, span.start)?..place(memory, span.end)?)
        });
        if lent.is_err() {
            // No key was handed out. The grant is spent here all the same: it counts as armed, and its claim as closed.
            let closing = self.claims.force_lane_closed(at, lane);
            self.lanes.carry_out(&closing);
        }
        Ok(lent?)
    }

    /// Arms a grant for what this node itself writes. Older claims and lanes are closed when it returns.
    pub(crate) fn arm_own(&mut self, at: NodeTime, grant: &Arc<Grant>) -> Result<(), ArmRefusal> {
        let closing = self.claims.arm_own(at, grant)?;
        self.lanes.carry_out(&closing);
        Ok(())
    }

    /// Writes bytes of this node's own into a slot of a grant that it armed for itself, `from` bytes behind the slot's beginning; false if it
    /// may not any more.
    pub(crate) fn write_own(
        &mut self,
        grant: &Grant,
        slot: SlotIndex,
        from: u64,
        bytes: &[u8],
    ) -> Result<bool, FabricError> {
        let Some(start) = self.claims.own_slot(grant.id, slot) else { return Ok(false) };
        let holder = grant.holder(self.claims.node()).ok_or(FabricError::Closed { what: "region" })?;
        let region = self.regions.get(&holder.region.index).ok_or(FabricError::Closed { what: "region" })?;
        region.memory.copy_in(place(&region.memory, start.0.saturating_add(from))?, bytes)?;
        Ok(true)
    }

    pub(crate) fn close(&mut self, at: NodeTime, grant: GrantId, writer: WriterId) -> Result<(), ConfirmRefusal> {
        let closing = self.claims.close(at, grant, writer)?;
        self.lanes.carry_out(&closing);
        Ok(())
    }

    /// Closes what time closes.
    pub(crate) fn expire(&mut self, at: NodeTime) {
        let closing: Closing = self.claims.expire(at);
        self.lanes.carry_out(&closing);
    }

    /// The node stops: every life is over, and no byte moves in or out from now on.
    pub(crate) fn void_all(&mut self, at: NodeTime) {
        for (region, life) in self.lives() {
            self.void(at, region.index, life);
        }
    }

    pub(crate) fn confirmable(&self, grant: GrantId, writer: WriterId) -> Result<Confirmable, ConfirmRefusal> {
        self.claims.confirmable(grant, writer)
    }

    /// Copies bytes of a region out, once.
    pub(crate) fn copy_out(&self, region: RegionIndex, offset: Offset, into: &mut [u8]) -> Result<(), FabricError> {
        let region = self.regions.get(&region).ok_or(FabricError::Closed { what: "region" })?;
        region.memory.copy_out(place(&region.memory, offset.0)?, into)
    }

    /// Bytes that peers can read, and bytes that peers can write; ranges that overlap count each time.
    pub(crate) fn registered_bytes(&self) -> (u64, u64) {
        let lives = self.regions.values().filter_map(|region| region.life.as_ref());
        (lives.filter_map(|life| life.reader.as_ref()).map(Reader::bytes).sum(), self.lanes.registered_bytes())
    }

    pub(crate) fn open_lanes(&self) -> usize {
        self.claims.open_lanes()
    }

    pub(crate) fn open_claims(&self) -> usize {
        self.claims.open_claims()
    }
}

/// An offset in a region as one in its memory.
fn place(memory: &Memory, offset: u64) -> Result<usize, FabricError> {
    usize::try_from(offset).map_err(|_| FabricError::OutOfRange {
        start: usize::MAX,
        end: usize::MAX,
        length: memory.len(),
    })
}

/// What is said of a region that is read through `reader`.
fn record(
    region: &Region,
    incarnation: Incarnation,
    epoch: RegionEpoch,
    reader: &Reader,
    endpoints: &EndpointConfig,
) -> Result<RegionRecord, FabricError> {
    Ok(RegionRecord {
        region: region.id,
        incarnation,
        epoch,
        length: region.memory.len() as u64,
        base: reader.base(),
        read_key: reader.key(),
        provider: endpoints.provider.name().to_owned(),
        address: FabricName::new(reader.address().as_bytes()).map_err(|wrong| FabricError::BadAddress {
            expected: "an address that fits in a region record".to_owned(),
            found: format!("{} bytes", wrong.found),
        })?,
    })
}
