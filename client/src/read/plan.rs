//! Which copy of each value is read, and which frames go together in one operation.
//!
//! Decides only: time, what is believed and which nodes are avoided are arguments. `fetch.rs` reads.

use crate::{
    error::GetError,
    read::{
        State, Want,
        cache::{Found, Place},
        check::Miss,
    },
    view::View,
};
use quarry_wire::{
    frame::header_bytes,
    ids::{Incarnation, NodeId, RegionId},
};
use std::{collections::BTreeSet, ops::Range, time::Duration};

/// Bytes that one operation reads at most, unless a single frame has more.
pub(crate) const RUN_BYTES: u64 = 1 << 20;
/// Payloads of this size go straight to where the reader finds them; smaller ones do so only into a buffer of the reader's and if no neighbour is
/// read with them, since copying them costs less than an operation each.
pub(crate) const DIRECT_BYTES: u64 = 256 << 10;
/// Of a frame's length, the part that may lie unused between it and its neighbour for both to be read at once.
const GAP_PART: u64 = 8;
/// And so many bytes more.
const GAP_BYTES: u64 = 512;

/// What to read.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The regions that are read.
    pub(crate) regions: Vec<(RegionId, Incarnation)>,
    /// By region and place in it.
    pub(crate) frames: Vec<Frame>,
    pub(crate) runs: Vec<Run>,
}

/// A copy that was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Frame {
    /// Which of the wants.
    pub(crate) want: usize,
    /// Which of the plan's regions.
    region: usize,
    /// Where it begins in the region.
    pub(crate) offset: u64,
    pub(crate) header: u64,
    pub(crate) payload: u64,
    /// There is another copy to try.
    spare: bool,
    /// It has a buffer of its own to go to, or is large enough to get memory of its own.
    direct: bool,
}

impl Frame {
    fn end(&self) -> u64 {
        self.offset + self.header + self.payload
    }
}

/// One operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    /// Which of the plan's frames it brings.
    pub(crate) frames: Range<usize>,
    /// Which of the plan's regions.
    pub(crate) region: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Each of its values has another copy to try.
    pub(crate) spare: bool,
    /// Its only frame goes straight to where the reader finds it.
    pub(crate) direct: bool,
}

/// Chooses a copy for each value that was found and joins neighbours. What has no copy left to try is missed and unknown again.
pub(crate) fn plan(
    wants: &mut [Want],
    view: &View,
    avoided: &BTreeSet<NodeId>,
    salt: u64,
    now: Duration,
    late: bool,
) -> Plan {
    let mut plan = Plan { regions: Vec::new(), frames: Vec::with_capacity(wants.len()), runs: Vec::new() };
    for (index, want) in wants.iter_mut().enumerate() {
        let State::Found { found, tried } = &mut want.state else { continue };
        if let Some(buffer) = &want.into
            && (buffer.len() as u64) < found.payload_bytes
        {
            let (needed, found) = (found.payload_bytes, buffer.len() as u64);
            want.state = State::Done(Err(GetError::BufferTooSmall { needed, found }));
            continue;
        }
        let chosen = if late || now >= found.lease_end {
            Err(Miss::LeaseOver)
        } else {
            choose(found, *tried, view, avoided, salt)
        };
        let (place, length, spare) = match chosen {
            Ok((copy, length, spare)) => {
                *tried |= 1 << copy;
                (found.copies[copy], length, spare)
            }
            Err(miss) => {
                want.missed(miss);
                continue;
            }
        };
        let header = header_bytes(want.key.as_bytes().len()) as u64;
        let payload = found.payload_bytes;
        if place.offset.checked_add(header + payload).is_none_or(|end| end > length) {
            let what = format!("its frame would end beyond the region's {length} bytes");
            want.failed(Miss::Corrupt { node: place.region.node, what });
            continue;
        }
        let region = plan.region(&place);
        let direct = want.into.is_some() || payload >= DIRECT_BYTES;
        plan.frames.push(Frame { want: index, region, offset: place.offset, header, payload, spare, direct });
    }
    plan.join();
    plan
}

/// The copy to read next, the length of its region, and whether there is another copy to try after it.
fn choose(
    found: &Found,
    tried: u32,
    view: &View,
    avoided: &BTreeSet<NodeId>,
    salt: u64,
) -> Result<(usize, u64, bool), Miss> {
    let count = found.copies.len();
    let spread = found.copies[0].spread ^ salt;
    let first = usize::try_from(spread % count as u64).expect("less than a usize");
    let known = |copy: &usize| view.record(found.copies[*copy].region, found.copies[*copy].incarnation).is_some();
    let order = || (0..count).map(|step| (first + step) % count).filter(|copy| tried >> copy & 1 == 0).filter(known);
    let healthy = |copy: &usize| !avoided.contains(&found.copies[*copy].region.node);
    let Some(copy) = order().find(healthy).or_else(|| order().next()) else {
        let node = found.copies[first].region.node;
        return Err(Miss::Unreachable { node, last: "its memory of that time is gone".to_owned() });
    };
    let Place { region, incarnation, .. } = found.copies[copy];
    let length = view.record(region, incarnation).map_or(0, |record| record.length);
    Ok((copy, length, order().any(|other| other != copy)))
}

impl Plan {
    fn region(&mut self, place: &Place) -> usize {
        let name = (place.region, place.incarnation);
        // A few at most, and mostly the last one.
        self.regions.iter().rposition(|known| *known == name).unwrap_or_else(|| {
            self.regions.push(name);
            self.regions.len() - 1
        })
    }

    fn join(&mut self) {
        self.frames.sort_unstable_by_key(|frame| (frame.region, frame.offset));
        for (index, frame) in self.frames.iter().enumerate() {
            let alone = frame.direct && frame.payload >= DIRECT_BYTES;
            if let Some(run) = self.runs.last_mut()
                && !alone
                && !run.direct
                && run.region == frame.region
                && let end = run.offset + run.bytes
                && frame.offset >= end
                && frame.offset - end <= (frame.header + frame.payload) / GAP_PART + GAP_BYTES
                && frame.end() - run.offset <= RUN_BYTES
            {
                run.frames.end = index + 1;
                run.bytes = frame.end() - run.offset;
                run.spare &= frame.spare;
                continue;
            }
            self.runs.push(Run {
                frames: index..index + 1,
                region: frame.region,
                offset: frame.offset,
                bytes: frame.end() - frame.offset,
                spare: frame.spare,
                direct: alone,
            });
        }
        for run in &mut self.runs {
            run.direct |= run.frames.len() == 1 && self.frames[run.frames.start].direct;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(want: usize, region: usize, offset: u64, payload: u64, direct: bool) -> Frame {
        Frame { want, region, offset, header: 128, payload, spare: want.is_multiple_of(2), direct }
    }
    fn joined(frames: Vec<Frame>) -> Plan {
        let mut plan = Plan { regions: Vec::new(), frames, runs: Vec::new() };
        plan.join();
        plan
    }

    #[test]
    fn neighbours_in_one_region_go_together_whatever_their_order() {
        let plan = joined((0..8).rev().map(|n| frame(n, 0, n as u64 * 4224, 4096, false)).collect());
        assert_eq!(plan.runs.len(), 1);
        assert_eq!((plan.runs[0].offset, plan.runs[0].bytes, plan.runs[0].frames.clone()), (0, 8 * 4224, 0..8));
        assert!(!plan.runs[0].spare, "some of its values have one copy only");
        let apart =
            joined(vec![frame(0, 0, 0, 4096, false), frame(1, 1, 4224, 4096, false), frame(2, 0, 1 << 20, 10, false)]);
        assert_eq!(apart.runs.len(), 3);
    }

    #[test]
    fn small_values_with_neighbours_are_copied_and_all_others_go_straight_into_their_buffers() {
        let direct = |frames| joined(frames).runs.iter().map(|run| (run.frames.len(), run.direct)).collect::<Vec<_>>();
        assert_eq!(direct(vec![frame(0, 0, 0, 4096, true)]), [(1, true)]);
        assert_eq!(direct(vec![frame(0, 0, 0, 4096, true), frame(1, 0, 4224, 4096, true)]), [(2, false)]);
        let large = DIRECT_BYTES;
        assert_eq!(direct(vec![frame(0, 0, 0, large, true), frame(1, 0, large + 128, large, true)]), [(1, true); 2]);
        let mixed =
            vec![frame(0, 0, 0, large, true), frame(1, 0, large + 128, 100, true), frame(2, 0, large + 356, 100, true)];
        assert_eq!(direct(mixed), [(1, true), (2, false)]);
    }

    proptest! {
        #[test]
        fn every_frame_is_in_one_run_that_covers_it_and_no_run_is_too_long(
            frames in prop::collection::vec((0usize..3, 0u64..60, 1u64..300_000, any::<bool>()), 0..60),
        ) {
            let frames = frames.into_iter().enumerate().map(|(want, (region, at, payload, direct))| frame(want, region, at * 64_000, payload, direct));
            let plan = joined(frames.collect());
            let mut next = 0;
            for run in &plan.runs {
                prop_assert_eq!(run.frames.start, next);
                next = run.frames.end;
                for frame in &plan.frames[run.frames.clone()] {
                    prop_assert_eq!(frame.region, run.region);
                    prop_assert!(frame.offset >= run.offset && frame.end() <= run.offset + run.bytes);
                }
                prop_assert!(run.bytes <= RUN_BYTES || run.frames.len() == 1);
                prop_assert!(!run.direct || run.frames.len() == 1);
            }
            prop_assert_eq!(next, plan.frames.len());
        }
    }
}
