//! What always holds of a directory, and of each step that it takes.

use super::{Directory, feed::Topic, namespaces::NamespaceEntry};
use crate::invariant::{Invariant, Violation};
use quarry_wire::{
    ids::{ExtentId, ExtentIndex, FeedNumber},
    keyring::Keyring,
    limits::extent_bytes,
};

impl Directory {
    /// Checks every invariant that a state can show.
    ///
    /// # Errors
    /// The first one that does not hold.
    pub fn check(&self) -> Result<(), Violation> {
        self.check_numbers()?;
        self.check_regions()?;
        self.check_signatures()
    }

    fn check_numbers(&self) -> Result<(), Violation> {
        let index = self.index_of_state();
        let things = usize::from(self.cluster.is_some())
            + self.certificates.len()
            + usize::from(self.revocations.is_some())
            + self.nodes.len()
            + self.retired.len()
            + self.namespaces.len()
            + self.regions.len()
            + self.regions.values().filter(|held| held.record.is_some()).count()
            + self.extents.len();
        Violation::unless(index.len() == things, Invariant::IndexAgrees, || "two changes share a number".to_owned())?;
        Violation::unless(index == self.index, Invariant::IndexAgrees, || "the feed's index".to_owned())?;
        let newest = self.index.last_key_value().map_or_else(FeedNumber::default, |(number, _)| *number);
        Violation::unless(newest <= self.last, Invariant::LogTimeOnlyCreeps, || {
            format!("{newest} is above the last number {}", self.last)
        })?;
        let oldest = self.index.first_key_value();
        Violation::unless(
            oldest.is_none_or(|(number, _)| number.0.generation == self.generation()),
            Invariant::EpochsOnlyGrow,
            || format!("{oldest:?} was not numbered anew in {}", self.generation()),
        )?;
        let generation = self.index.values().filter(|topic| **topic == Topic::Generation).count();
        Violation::unless(generation == usize::from(self.cluster.is_some()), Invariant::IndexAgrees, || {
            format!("{generation} beginnings of a generation")
        })?;
        self.check_members()?;
        for (id, NamespaceEntry { namespace, .. }) in &self.namespaces {
            let named =
                namespace.id == *id && self.names.get(&namespace.name) == Some(id) && *id <= self.namespace_last;
            Violation::unless(named, Invariant::IndexAgrees, || format!("the name of {id}"))?;
        }
        Violation::unless(self.names.len() == self.namespaces.len(), Invariant::IndexAgrees, || {
            "a name without a namespace".to_owned()
        })
    }

    fn check_members(&self) -> Result<(), Violation> {
        let held = [&self.members.done, &self.members.under_way];
        let numbers: Vec<_> = held.into_iter().flatten().map(|change| change.number).collect();
        let grow = numbers.is_sorted_by(|one, other| one < other)
            && numbers.last().is_none_or(|last| *last <= self.members.last && last.generation == self.generation());
        Violation::unless(grow, Invariant::EpochsOnlyGrow, || format!("changes of members {numbers:?}"))?;
        let back = self.regions.keys().map(|region| region.node).find(|node| self.is_retired(*node));
        Violation::unless(back.is_none(), Invariant::EpochsOnlyGrow, || format!("{back:?} is retired"))
    }

    fn check_regions(&self) -> Result<(), Violation> {
        let generation = self.generation();
        let mut extents = 0;
        for (id, held) in &self.regions {
            let state = held.state;
            let named = state.region == *id && state.incarnation.0.generation == generation && state.bytes > 0;
            Violation::unless(named, Invariant::EpochsOnlyGrow, || format!("{id} is in {}", state.incarnation))?;
            let whole = ExtentId { region: *id, index: ExtentIndex(0) }..=ExtentId {
                region: *id,
                index: ExtentIndex(u32::MAX),
            };
            let indexes = self.extents.range(whole).map(|(extent, _)| u64::from(extent.index.0));
            let own = indexes.eq(0..state.bytes / extent_bytes(state.bytes));
            Violation::unless(own, Invariant::NothingLeaks, || format!("{id} lacks an extent"))?;
            extents += state.bytes / extent_bytes(state.bytes);
            if let Some(record) = &held.record {
                let said = &record.signed.statement;
                let fits = said.region == *id
                    && said.incarnation == state.incarnation
                    && state.up
                    && said.length == state.bytes;
                Violation::unless(fits, Invariant::EpochsOnlyGrow, || {
                    format!("the record of {id} is of another life")
                })?;
            }
        }
        Violation::unless(extents == self.extents.len() as u64, Invariant::NothingLeaks, || {
            "an extent of no region".to_owned()
        })?;
        for (id, lending) in &self.extents {
            let lent = lending.shard.is_none_or(|shard| {
                shard.0 > 0
                    && shard.0 <= self.shards()
                    && lending.lend.0.generation == generation
                    && lending.lend.0.number > 0
            });
            Violation::unless(lent, Invariant::NothingLeaks, || format!("the lending of {id}: {lending:?}"))?;
        }
        Ok(())
    }

    fn check_signatures(&self) -> Result<(), Violation> {
        let expected = self.keyring_of_state()?;
        let same = match (&expected, &self.keyring) {
            (None, None) => true,
            (Some(one), Some(other)) => {
                one.generation() == other.generation()
                    && one.revocation_number() == other.revocation_number()
                    && one.certificates().eq(other.certificates())
            }
            (None, Some(_)) | (Some(_), None) => false,
        };
        Violation::unless(same, Invariant::NothingUnsigned, || "the keyring differs from the certificates".to_owned())
    }

    /// The keyring that the state implies: every certificate and the revocation list, checked again.
    pub(super) fn keyring_of_state(&self) -> Result<Option<Keyring>, Violation> {
        let unsigned = |what: &str, why: &dyn std::fmt::Display| Violation {
            invariant: Invariant::NothingUnsigned,
            detail: format!("{what}: {why}"),
        };
        let Some(cluster) = &self.cluster else {
            let nothing = self.certificates.is_empty() && self.revocations.is_none();
            Violation::unless(nothing, Invariant::NothingUnsigned, || "statements before there is a root".to_owned())?;
            return Ok(None);
        };
        let mut keyring = Keyring::new(cluster.first.uuid, cluster.first.root).map_err(|why| unsigned("root", &why))?;
        keyring.see_generation(cluster.generation);
        for (serial, held) in &self.certificates {
            keyring.admit(&held.signed).map_err(|why| unsigned("certificate", &why))?;
            Violation::unless(held.signed.statement.serial == *serial, Invariant::NothingUnsigned, || {
                serial.to_string()
            })?;
        }
        if let Some(list) = &self.revocations {
            keyring.revoke(&list.signed).map_err(|why| unsigned("revocations", &why))?;
        }
        Ok(Some(keyring))
    }

    /// Checks every invariant that the step from `before` to this state can show.
    ///
    /// # Errors
    /// The first one that does not hold.
    pub fn check_step(&self, before: &Self) -> Result<(), Violation> {
        Violation::unless(self.now >= before.now && self.last >= before.last, Invariant::LogTimeOnlyCreeps, || {
            format!("{} after {}, {} after {}", self.now, before.now, self.last, before.last)
        })?;
        Violation::unless(
            self.generation() >= before.generation() && self.namespace_last >= before.namespace_last,
            Invariant::EpochsOnlyGrow,
            || "a generation or a namespace number went back".to_owned(),
        )?;
        let kept = before.retired.keys().all(|node| self.is_retired(*node));
        let one = before.members.under_way.as_ref().is_none_or(|old| {
            let now = self.members.under_way.as_ref();
            now == Some(old) || now.is_none() || self.generation() > before.generation()
        });
        Violation::unless(kept && one && self.members.last >= before.members.last, Invariant::EpochsOnlyGrow, || {
            "a retired node came back, or a change of members took the place of another".to_owned()
        })?;
        for (id, old) in before.regions.iter().filter(|(id, _)| !self.is_retired(id.node)) {
            let new = self.regions.get(id);
            let grows = new.is_some_and(|new| new.state.incarnation >= old.state.incarnation);
            Violation::unless(grows, Invariant::EpochsOnlyGrow, || format!("the incarnation of {id}"))?;
            let records = new.and_then(|new| Some((new, new.record.as_ref()?, old.record.as_ref()?)));
            let grows = records.is_none_or(|(new, now, was)| {
                new.state.incarnation > old.state.incarnation
                    || now.signed.statement.epoch > was.signed.statement.epoch
                    || now.signed == was.signed
            });
            Violation::unless(grows, Invariant::EpochsOnlyGrow, || format!("the epoch of {id}"))?;
        }
        for (id, old) in before.extents.iter().filter(|(id, _)| !self.is_retired(id.region.node)) {
            let new = self.extents.get(id);
            let grows = new.is_some_and(|new| {
                new.lend > old.lend || new.lend == old.lend && (new.shard == old.shard || new.shard.is_none())
            });
            Violation::unless(grows, Invariant::EpochsOnlyGrow, || format!("the lending of {id}"))?;
        }
        Ok(())
    }
}
