//! Pins: leases that are replicated one by one, for reads that take longer than a lease.
//!
//! A pin names values as they were when it was made, and an end in log time. While a pin is on a value its copies stay where they are, also
//! after the key was replaced or deleted; when the last pin on a value that is not current ends, its copies rest like all others that were
//! readable, and are granted again only after that. So memory is given to another only after the end of every pin on it, and the quarantine
//! (*Leases hold*). A pin ends by itself unless its owner renews it, lasts at most [`PIN_MAX`] at a time, and a shard and an owner hold only so
//! many, so that nothing is kept for ever by those who are gone (*Nothing leaks*).
//!
//! A pin outlives neither the memory that it is on (a value whose holders lost it is gone for a pin too) nor the generation.

use super::{
    PinMiss, PinRefusal, PinRequest, PinTerm, Pinned, RenewRefusal, RequestOutcome, Resolved, Shard, ValueRef,
    grants::{Leave, Slot},
    quarantine::Deadline,
};
use crate::{
    cow_arc::CowArc,
    ordered::Map,
    requests::{RequestId, RequestRefusal},
};
use quarry_wire::{
    ids::{NamespaceId, Ordinal, PinId, WriterId},
    key::Key,
    limits::{KEYS_PER_PIN_MAX, PIN_MAX, PINS_PER_OWNER_MAX, PINS_PER_SHARD_MAX},
    units::{LogTime, millis},
    version::Version,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// Values that are kept where they are.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Pin {
    /// Who reads through it; nobody else renews or releases it.
    pub(super) owner: WriterId,
    /// Moved by Renew, upwards only. Invariant: it lies ahead of log time.
    pub(super) end: LogTime,
    /// Where the values are written down; at least one.
    pub(super) values: BTreeSet<ValueRef>,
}

/// Whether a pin may last so long: whole milliseconds, at least one.
fn is_term(duration: Duration) -> bool {
    millis(duration) > 0 && duration <= PIN_MAX && duration.subsec_nanos().is_multiple_of(1_000_000)
}

impl Shard {
    pub(super) fn pin(&mut self, asked: &PinRequest) -> Result<Pinned, PinRefusal> {
        match self.requests.look(self.now, self.settings.outcome_kept, asked.request)? {
            Some(RequestOutcome::Pin(pinned)) => return Ok(pinned.clone()),
            Some(RequestOutcome::Grant(_) | RequestOutcome::Delete(_) | RequestOutcome::Renew(_)) => {
                return Err(RequestRefusal::Taken.into());
            }
            None => {}
        }
        self.admit_pin(asked)?;
        let term = PinTerm { duration: asked.duration, until: self.now.after(asked.duration) };
        let mut values = BTreeSet::new();
        let mut keys = Vec::with_capacity(asked.keys.len());
        for key in &asked.keys {
            keys.push(self.find_to_pin(asked.namespace, key).map(|(value, version)| {
                values.insert(value);
                version
            }));
        }
        let pin = (!values.is_empty()).then(|| self.hold(asked.owner, term.until, values));
        let pinned = Pinned { pin, term, keys };
        self.requests.record(asked.request, RequestOutcome::Pin(pinned.clone()));
        Ok(pinned)
    }

    fn admit_pin(&self, asked: &PinRequest) -> Result<(), PinRefusal> {
        if !is_term(asked.duration) {
            return Err(PinRefusal::Duration { most: PIN_MAX, found: asked.duration });
        }
        if asked.keys.is_empty() || asked.keys.len() > KEYS_PER_PIN_MAX {
            let found = u32::try_from(asked.keys.len()).unwrap_or(u32::MAX);
            return Err(PinRefusal::Keys { most: count(KEYS_PER_PIN_MAX), found });
        }
        let retry_after = |ends: Option<LogTime>| ends.map_or(Duration::ZERO, |end| end.since(self.now));
        if self.pins_of(asked.owner) >= PINS_PER_OWNER_MAX {
            let own = self.pins.values().filter(|pin| pin.owner == asked.owner);
            let retry_after = retry_after(own.map(|pin| pin.end).min());
            return Err(PinRefusal::OwnersPins { limit: count(PINS_PER_OWNER_MAX), retry_after });
        }
        if self.pins.len() >= PINS_PER_SHARD_MAX {
            let retry_after = retry_after(self.pins.values().map(|pin| pin.end).min());
            return Err(PinRefusal::ShardsPins { limit: count(PINS_PER_SHARD_MAX), retry_after });
        }
        Ok(())
    }

    fn find_to_pin(&self, namespace: NamespaceId, key: &Key) -> Result<(ValueRef, Version), PinMiss> {
        let shard = key.shard(namespace, self.settings.shards);
        if shard != self.id {
            return Err(PinMiss::WrongShard { expected: shard, found: self.id });
        }
        let value = self.values.get(&(namespace, key.clone())).copied().ok_or(PinMiss::NotFound)?;
        let current = self.version(namespace, key).ok_or(PinMiss::NotFound)?;
        Ok((value, current))
    }

    fn hold(&mut self, owner: WriterId, end: LogTime, values: BTreeSet<ValueRef>) -> PinId {
        self.pin_last += 1;
        let id = PinId(Ordinal { generation: self.generation, number: self.pin_last });
        for value in &values {
            *self.pinned.or_default(*value) += 1;
        }
        *self.pin_owners.entry(owner).or_default() += 1;
        self.deadlines.insert((end, Deadline::Unpin(id)));
        self.pins.insert(id, CowArc::new(Pin { owner, end, values }));
        id
    }

    pub(super) fn renew(
        &mut self,
        request: RequestId,
        owner: WriterId,
        id: PinId,
        duration: Duration,
    ) -> Result<PinTerm, RenewRefusal> {
        match self.requests.look(self.now, self.settings.outcome_kept, request)? {
            Some(RequestOutcome::Renew(term)) => return Ok(*term),
            Some(RequestOutcome::Grant(_) | RequestOutcome::Delete(_) | RequestOutcome::Pin(_)) => {
                return Err(RequestRefusal::Taken.into());
            }
            None => {}
        }
        if !is_term(duration) {
            return Err(RenewRefusal::Duration { most: PIN_MAX, found: duration });
        }
        let held = self.pins.get_mut(&id).filter(|pin| pin.owner == owner);
        let pin = held.ok_or(RenewRefusal::UnknownPin { pin: id })?;
        self.deadlines.remove(&(pin.end, Deadline::Unpin(id)));
        pin.end = pin.end.max(self.now.after(duration));
        self.deadlines.insert((pin.end, Deadline::Unpin(id)));
        let term = PinTerm { duration, until: pin.end };
        self.requests.record(request, RequestOutcome::Renew(term));
        Ok(term)
    }

    /// Ends a pin of this owner before its time; false if there is none. Its owner reads through it no more.
    pub(super) fn release(&mut self, owner: WriterId, id: PinId) -> bool {
        let Some(pin) = self.pins.get(&id).filter(|pin| pin.owner == owner) else { return false };
        self.deadlines.remove(&(pin.end, Deadline::Unpin(id)));
        self.unpin(id);
        true
    }

    /// A pin is over: what nothing else keeps rests from now on.
    pub(super) fn unpin(&mut self, id: PinId) {
        let pin = self.pins.remove(&id).expect("only a pin that is there ends");
        let owned = self.pin_owners.get_mut(&pin.owner).expect("the pins of an owner were counted");
        *owned -= 1;
        if *owned == 0 {
            self.pin_owners.remove(&pin.owner);
        }
        for value in pin.values.iter().copied() {
            let pins = self.pinned.get_mut(&value).expect("the pins on a value were counted");
            *pins -= 1;
            if *pins == 0 {
                self.pinned.remove(&value);
                self.let_go(value);
            }
        }
    }

    /// No pin is on a value any more: its copies rest, unless it is current.
    fn let_go(&mut self, value: ValueRef) {
        // Its memory may be lost, and its slab gone with it.
        let Some(slab) = self.slabs.get(&value.grant()) else { return };
        let until = self.rest_until(slab);
        for holder in 0..slab.grant.holders.len() {
            if matches!(self.slabs[&value.grant()].slot(holder, value.slot), Some(Slot::Pinned { .. })) {
                self.leave(value.grant(), holder, value.slot, Leave::Rest(until));
            }
        }
        self.settle(value.grant());
    }

    /// Pins are memory's: all go with a generation, and what they kept is void.
    pub(super) fn drop_pins(&mut self) {
        for (id, pin) in &std::mem::take(&mut self.pins) {
            self.deadlines.remove(&(pin.end, Deadline::Unpin(*id)));
        }
        self.pinned.clear();
        self.pin_owners.clear();
    }

    /// Whether a pin is on the value that is written down there.
    pub(super) fn is_pinned(&self, value: ValueRef) -> bool {
        self.pinned.contains_key(&value)
    }

    fn pins_of(&self, owner: WriterId) -> usize {
        self.pin_owners.get(&owner).map_or(0, |count| *count as usize)
    }

    /// How many pins there are.
    #[must_use]
    pub fn pins(&self) -> usize {
        self.pins.len()
    }

    /// The values that a pin of this owner keeps, with the copies that are there still, in no order that means anything; none if there is no
    /// such pin.
    #[must_use]
    pub fn pinned(&self, owner: WriterId, pin: PinId) -> Option<Vec<Resolved>> {
        let pin = self.pins.get(&pin).filter(|pin| pin.owner == owner)?;
        Some(pin.values.iter().filter_map(|value| self.resolved(*value)).collect())
    }

    /// Pins by value and by owner, as the state implies them.
    pub(super) fn pinned_of_state(&self) -> (Map<ValueRef, u32>, BTreeMap<WriterId, u32>) {
        let (mut pinned, mut owners) = (Map::new(), BTreeMap::new());
        for pin in self.pins.values() {
            *owners.entry(pin.owner).or_default() += 1;
            for value in &pin.values {
                *pinned.or_default(*value) += 1;
            }
        }
        (pinned, owners)
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).expect("limits are small")
}
