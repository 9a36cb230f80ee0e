//! What the memory of data nodes is used for, place by place: each region in cells of equal size, in the order of addresses.
//!
//! Drawn from the directory and one shard after the other, each as it is at its own moment. Cells are few, however large a region is; each shows what
//! takes up most of it.

use crate::{Directory, Shard};
use quarry_wire::{
    ids::{ExtentId, RegionId, ShardId},
    limits::extent_bytes,
};
use std::collections::BTreeMap;

/// What some bytes are used for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Use {
    /// Lent to no shard.
    Unlent,
    /// Lent to a shard that has not seen it yet, or on the way back.
    Transit,
    /// Free in a shard.
    Free,
    /// In quarantine.
    Resting,
    /// Granted and not committed.
    Granted,
    /// Copies of values that are current.
    Committed,
    /// Copies that are kept for pins.
    Pinned,
}

impl Use {
    /// All of them; of two that take up as much of a cell, the later one is shown.
    pub const ALL: [Self; 7] =
        [Self::Unlent, Self::Transit, Self::Free, Self::Resting, Self::Granted, Self::Committed, Self::Pinned];

    /// The letter that stands for it in [`RegionMap::letters`].
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Unlent => 'u',
            Self::Transit => 't',
            Self::Free => 'f',
            Self::Resting => 'r',
            Self::Granted => 'g',
            Self::Committed => 'c',
            Self::Pinned => 'p',
        }
    }
}

/// One region in cells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionMap {
    /// Bytes of the region.
    pub bytes: u64,
    /// Bytes of a cell; the last one may be shorter.
    pub cell_bytes: u64,
    /// For each cell the bytes of each use, in the order of [`Use::ALL`].
    cells: Vec<[u64; Use::ALL.len()]>,
}

impl RegionMap {
    fn new(bytes: u64, cells: u32) -> Self {
        let cell_bytes = bytes.div_ceil(u64::from(cells.max(1))).max(1);
        let cells = usize::try_from(bytes.div_ceil(cell_bytes)).expect("no more than were asked for");
        Self { bytes, cell_bytes, cells: vec![[0; Use::ALL.len()]; cells] }
    }

    /// What is beyond the region's end is left out.
    fn paint(&mut self, start: u64, bytes: u64, used: Use) {
        let end = start.saturating_add(bytes).min(self.bytes);
        let mut at = start;
        while at < end {
            let cell = at / self.cell_bytes;
            let next = end.min((cell + 1).saturating_mul(self.cell_bytes));
            self.cells[usize::try_from(cell).expect("below the region's end")][used as usize] += next - at;
            at = next;
        }
    }

    /// Bytes of the whole region that are used so.
    #[must_use]
    pub fn total(&self, used: Use) -> u64 {
        self.cells.iter().map(|cell| cell[used as usize]).sum()
    }

    /// One letter for each cell: that of the use which takes up most of it.
    #[must_use]
    pub fn letters(&self) -> String {
        let most = |cell: &[u64; Use::ALL.len()]| Use::ALL.into_iter().max_by_key(|used| cell[*used as usize]);
        self.cells.iter().map(|cell| most(cell).expect("there are uses").letter()).collect()
    }
}

/// A map that is being drawn: first the directory, then shard by shard.
#[derive(Clone, Debug)]
pub struct Maps {
    regions: BTreeMap<RegionId, RegionMap>,
    /// Extents that are lent, to whom, as long as that shard was not drawn or does not hold it.
    lent: BTreeMap<ExtentId, ShardId>,
}

impl Maps {
    /// The regions that the directory knows, in at most `cells` cells each.
    #[must_use]
    pub fn new(directory: &Directory, cells: u32) -> Self {
        let regions = directory.regions().map(|it| (it.state.region, RegionMap::new(it.state.bytes, cells)));
        let mut maps = Self { regions: regions.collect(), lent: BTreeMap::new() };
        for (extent, to, _) in directory.extents() {
            match to {
                Some(shard) => drop(maps.lent.insert(extent, shard)),
                None => maps.paint_extent(extent, Use::Unlent),
            }
        }
        maps
    }

    /// What this shard does with the extents that it holds and was lent.
    pub fn add(&mut self, shard: &Shard) {
        let Self { regions, lent } = self;
        lent.retain(|extent, to| *to != shard.id() || shard.held(*extent).is_none());
        let mut paint = |region, start, bytes, used| {
            // One that the directory does not know, or not yet.
            if let Some(map) = regions.get_mut(&region) {
                RegionMap::paint(map, start, bytes, used);
            }
        };
        shard.each_use(&mut paint);
    }

    /// The maps, once all shards are drawn.
    #[must_use]
    pub fn finish(mut self) -> BTreeMap<RegionId, RegionMap> {
        for extent in std::mem::take(&mut self.lent).into_keys() {
            self.paint_extent(extent, Use::Transit);
        }
        self.regions
    }

    fn paint_extent(&mut self, extent: ExtentId, used: Use) {
        if let Some(map) = self.regions.get_mut(&extent.region) {
            let bytes = extent_bytes(map.bytes);
            map.paint(u64::from(extent.index.0).saturating_mul(bytes), bytes, used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_shows_what_takes_up_most_of_it() {
        let mut map = RegionMap::new(1_000, 4);
        assert_eq!((map.cell_bytes, map.cells.len()), (250, 4));
        map.paint(0, 400, Use::Free);
        map.paint(400, 50, Use::Granted);
        map.paint(450, 550, Use::Committed);
        // Half of the second cell is free, a fifth granted.
        assert_eq!(map.letters(), "ffcc");
        assert_eq!([Use::Free, Use::Granted, Use::Committed].map(|used| map.total(used)), [400, 50, 550]);
    }

    #[test]
    fn cells_are_no_more_than_asked_for_and_the_last_may_be_short() {
        for (bytes, cells) in [(1, 8), (7, 3), (1 << 40, 512), (1_000_003, 512), (0, 4)] {
            let mut map = RegionMap::new(bytes, cells);
            map.paint(0, u64::MAX, Use::Resting);
            assert!(map.cells.len() <= cells as usize);
            assert_eq!((map.total(Use::Resting), map.letters().len()), (bytes, map.cells.len()));
        }
    }
}
