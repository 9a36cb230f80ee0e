//! Frames that the caller fills in place, in the registered memory from which they are written: no copy of a payload anywhere.
//!
//! Decides how reserved frames lie: those of one line side by side, so that they leave in one operation. Takes all memory of a call at once, so
//! that two calls never wait for each other with half of theirs. Slots are taken when the frames are put, so filling has no time limit.

use crate::{
    calls,
    client::Shared,
    error::PutError,
    namespace::PutMode,
    write::{
        self, Value,
        flow::Lot,
        frames::Payload,
        line::{Demand, LineId},
    },
};
use quarry_fabric::{SoleSpan, Span};
use quarry_wire::{frame::header_bytes, ids::NamespaceId, key::Key, version::Version};
use std::{
    collections::BTreeMap,
    fmt,
    ops::{Deref, DerefMut, Range},
    sync::Arc,
};
use tokio::time::{Instant, timeout_at};

/// A frame whose payload is filled in place, then [put](Self::put). It dereferences to the payload's bytes, which hold anything at first. Dropping
/// it gives its place in the window back.
///
/// ```no_run
/// # async fn example(blocks: quarry_client::Namespace) -> Result<(), quarry_client::PutError> {
/// use quarry_client::PutMode;
///
/// let mut block = blocks.reserve("layer-7/block-42", 65_536).await?;
/// block.fill(7);
/// let version = block.put(PutMode::Create).await?;
/// # drop(version);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Reserved(ReservedMany);

impl Reserved {
    /// Writes it, as [`Namespace::put_with`](crate::Namespace::put_with) does.
    ///
    /// # Errors
    /// See [`PutError`].
    pub async fn put(self, mode: PutMode) -> Result<Version, PutError> {
        let mut results = self.0.put(mode).await;
        results.pop().expect("one frame, one result")
    }
}

impl Deref for Reserved {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.payload(0)
    }
}

impl DerefMut for Reserved {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.payload_mut(0)
    }
}

impl TryFrom<ReservedMany> for Reserved {
    type Error = ReservedMany;
    /// The only frame of a reservation.
    fn try_from(many: ReservedMany) -> Result<Self, ReservedMany> {
        if many.len() == 1 { Ok(Self(many)) } else { Err(many) }
    }
}

/// Frames whose payloads are filled in place, then [put](Self::put) together. Dropping them gives their place in the window back.
///
/// ```no_run
/// # async fn example(blocks: quarry_client::Namespace) -> Result<(), Box<dyn std::error::Error>> {
/// use quarry_client::{Key, PutMode};
///
/// let mut wanted = Vec::new();
/// for index in 0..100 {
///     wanted.push((Key::new(format!("block-{index}"))?, 4096));
/// }
/// let mut frames = blocks.reserve_many(&wanted).await?;
/// for index in 0..frames.len() {
///     frames.payload_mut(index).fill(7);
/// }
/// for version in frames.put(PutMode::Create).await {
///     version?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct ReservedMany {
    shared: Arc<Shared>,
    namespace: NamespaceId,
    /// The slots of all frames, those of one line side by side; none if there are no frames.
    memory: Option<SoleSpan>,
    lines: Vec<(LineId, Vec<usize>)>,
    /// Key and place of the payload in `memory`, by the caller's order.
    frames: Vec<(Key, Range<usize>)>,
}

/// Takes memory for frames of `wanted`: keys and payload lengths.
pub(crate) async fn reserve_many(
    shared: &Arc<Shared>,
    namespace: NamespaceId,
    wanted: &[(Key, usize)],
) -> Result<ReservedMany, PutError> {
    let core = shared.core();
    let deadline = core.deadline().map_err(PutError::from)?;
    let shards = core.control.view().read().shards();
    let mut by_line: BTreeMap<LineId, Vec<usize>> = BTreeMap::new();
    for (index, (key, length)) in wanted.iter().enumerate() {
        let line = LineId::of(namespace, key, *length as u64, shards)?;
        by_line.entry(line).or_insert_with(|| Vec::with_capacity(wanted.len() - index)).push(index);
    }
    let mut frames: Vec<(Key, Range<usize>)> = wanted.iter().map(|(key, _)| (key.clone(), 0..0)).collect();
    let mut end = 0;
    for (line, indices) in &by_line {
        for index in indices {
            let (key, place) = &mut frames[*index];
            let start = end + header_bytes(key.as_bytes().len());
            *place = start..start + wanted[*index].1;
            end += line.slot_size as usize;
        }
    }
    let limit = core.write_window.capacity();
    if end > limit {
        return Err(PutError::WindowExceeded { limit, found: end });
    }
    let memory = if end == 0 {
        None
    } else {
        let late = |_| PutError::Deadline { last: "waiting for room in the window".to_owned() };
        let span = timeout_at(deadline, core.write_window.take(end)).await.map_err(late)??;
        Some(SoleSpan::from(span))
    };
    let lines = by_line.into_iter().collect();
    Ok(ReservedMany { shared: Arc::clone(shared), namespace, memory, lines, frames })
}

impl ReservedMany {
    /// How many frames there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The key of a frame, counted as it was asked for.
    ///
    /// # Panics
    /// If there is no such frame.
    #[must_use]
    pub fn key(&self, index: usize) -> &Key {
        &self.frames[index].0
    }

    /// The payload of a frame, counted as it was asked for.
    ///
    /// # Panics
    /// If there is no such frame.
    #[must_use]
    pub fn payload(&self, index: usize) -> &[u8] {
        let place = self.frames[index].1.clone();
        &self.memory.as_ref().expect("where there is a frame there is memory")[place]
    }

    /// As [`payload`](Self::payload), to be filled.
    ///
    /// # Panics
    /// If there is no such frame.
    pub fn payload_mut(&mut self, index: usize) -> &mut [u8] {
        let place = self.frames[index].1.clone();
        &mut self.memory.as_mut().expect("where there is a frame there is memory")[place]
    }

    /// Writes them all. One result per frame, in the order in which they were asked for.
    pub async fn put(self, mode: PutMode) -> Vec<Result<Version, PutError>> {
        let (shared, began) = (Arc::clone(&self.shared), Instant::now());
        let lengths: Vec<usize> = self.frames.iter().map(|(_, place)| place.len()).collect();
        calls::call(shared.core(), "put", async {
            let results = Box::pin(self.write(mode)).await;
            shared.core().counters.meters.put(began.elapsed(), &lengths, &results);
            results
        })
        .await
    }

    async fn write(self, mode: PutMode) -> Vec<Result<Version, PutError>> {
        let Self { shared, namespace, memory, lines, frames } = self;
        let core = shared.core();
        let deadline = match core.deadline() {
            Ok(deadline) => deadline,
            Err(error) => return frames.iter().map(|_| Err(PutError::from(error.clone()))).collect(),
        };
        let mut rest = memory.map(Span::from);
        let lots = lines.into_iter().map(|(id, indices)| {
            let whole = rest.take().expect("each line has its slots");
            let placed = match whole.split(indices.len() * id.slot_size as usize) {
                Ok((placed, others)) => {
                    rest = Some(others);
                    placed
                }
                Err(last) => last,
            };
            let values = indices.into_iter().map(|index| {
                let (key, place) = &frames[index];
                Value::new(core, index, key.clone(), Payload::Placed, place.len() as u64, mode)
            });
            let line = core.line(id);
            let (values, placed) = (values.collect::<Vec<_>>(), Some(placed));
            let demand = Demand::new(&line, values.len());
            Lot { line, values, placed, demand }
        });
        let lots = lots.collect();
        let keys: Vec<Key> = frames.iter().map(|(key, _)| key.clone()).collect();
        let mut results: Vec<Option<Result<Version, PutError>>> = keys.iter().map(|_| None).collect();
        for (index, result) in write::run(core, namespace, &keys, lots, deadline).await {
            results[index] = Some(result);
        }
        write::in_order(results)
    }
}

impl fmt::Debug for ReservedMany {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReservedMany").field("frames", &self.frames).finish_non_exhaustive()
    }
}
