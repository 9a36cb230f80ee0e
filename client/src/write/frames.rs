//! Frames on their way: headers, payloads and what lies between them, in registered memory.
//!
//! Decides where a frame is made. Payloads that the caller gave are copied behind their headers, neighbours side by side, so that they leave in
//! one operation; payloads that lie in registered memory already (see `reserve.rs`) get their headers there. A value that is written again keeps
//! its payload where it is and gets another header, since an operation that was given up may still be reading the first one.

use crate::{
    checksum,
    core::Core,
    error::PutError,
    write::{Value, flow::PART_BYTES, line::LineId},
};
use bytes::Bytes;
use quarry_fabric::{FabricError, LocalBuffer, Pieces, Span};
use quarry_wire::{
    frame::{FrameHeader, FrameKind, HEADER_BYTES_MAX, header_bytes},
    ids::NamespaceId,
};
use std::{ops::Range, sync::Arc};
use tokio::time::Instant;

/// Where a value's payload is.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    /// In the caller's memory.
    Given(Bytes),
    /// In its slot's place in registered memory, next in the flow's line.
    Placed,
    /// In registered memory, where it was written from before.
    Kept { span: Arc<Span>, at: usize },
}

/// What one operation writes.
#[derive(Clone, Debug)]
pub(crate) struct Frames {
    pieces: Pieces<LocalBuffer>,
    bytes: usize,
}

impl Frames {
    pub(crate) fn pieces(&self) -> &Pieces<LocalBuffer> {
        &self.pieces
    }
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// How many of `values`, from the first on, are written by one operation.
pub(crate) fn of_one_part(values: &[Value], slot_size: u32) -> usize {
    match values[0].payload {
        Payload::Kept { .. } => 1,
        Payload::Given(_) | Payload::Placed => {
            let kind = std::mem::discriminant(&values[0].payload);
            let fitting = (PART_BYTES / slot_size as usize).max(1);
            values.iter().take(fitting).take_while(|value| std::mem::discriminant(&value.payload) == kind).count()
        }
    }
}

/// The registered memory for the frames of one part.
pub(crate) async fn memory(
    core: &Core,
    values: &[Value],
    slot_size: usize,
    placed: &mut Option<Span>,
) -> Result<Span, FabricError> {
    let slots = values.len() * slot_size;
    match values[0].payload {
        Payload::Given(_) => core.write_window.take(slots).await,
        Payload::Kept { .. } => core.write_window.take(HEADER_BYTES_MAX).await,
        Payload::Placed => {
            let rest = placed.take().expect("placed values come with their slots");
            match rest.split(slots) {
                Ok((first, rest)) => {
                    *placed = Some(rest);
                    Ok(first)
                }
                Err(last) => Ok(last),
            }
        }
    }
}

/// Makes the frames of one part in the memory that it got from [`memory`].
pub(crate) fn build(core: &Core, line: LineId, values: &mut [Value], mut memory: Span) -> Result<Frames, PutError> {
    let slot_size = line.slot_size as usize;
    let bytes = memory.bytes();
    let began = Instant::now();
    for (place, value) in values.iter_mut().enumerate() {
        let payload = value.payload_range(place * slot_size);
        let crc = match (&value.payload, value.crc) {
            (Payload::Given(given), None) => checksum::copied(given, &mut bytes[payload]),
            (Payload::Given(given), Some(crc)) => {
                bytes[payload].copy_from_slice(given);
                crc
            }
            (Payload::Placed, None) => checksum::of(&bytes[payload]),
            (Payload::Placed | Payload::Kept { .. }, Some(crc)) => crc,
            (Payload::Kept { .. }, None) => unreachable!("what was written before has its checksum"),
        };
        value.crc = Some(crc);
    }
    let checked = Instant::now();
    core.counters.checksumming.add(checked - began);
    for (place, value) in values.iter().enumerate() {
        let at = place * slot_size;
        let payload = value.payload_range(at);
        header(line.namespace, value).write_to(&mut bytes[at..payload.start]);
        // Nothing of an earlier frame leaves between this one and the next.
        if place + 1 < values.len() {
            bytes[payload.end..at + slot_size].fill(0);
        }
    }
    core.counters.building.add(checked.elapsed());
    let last = values.last().expect("a part has a value");
    let span = Arc::new(memory);
    if let Payload::Kept { span: kept, at } = &last.payload {
        let (head, payload) = (last.header_bytes(), last.payload_range(*at));
        let length = head + payload.len();
        let head = LocalBuffer::of_span(&span, 0..head)?;
        let pieces = if payload.is_empty() { head.into() } else { [head, LocalBuffer::of_span(kept, payload)?].into() };
        return Ok(Frames { pieces, bytes: length });
    }
    let end = last.payload_range((values.len() - 1) * slot_size).end;
    for (place, value) in values.iter_mut().enumerate() {
        if let Payload::Placed = value.payload {
            value.payload = Payload::Kept { span: Arc::clone(&span), at: place * slot_size };
        }
    }
    Ok(Frames { pieces: LocalBuffer::of_span(&span, 0..end)?.into(), bytes: end })
}

fn header(namespace: NamespaceId, value: &Value) -> FrameHeader {
    FrameHeader {
        namespace,
        key: value.key.clone(),
        version: value.version,
        kind: FrameKind::Value,
        payload_bytes: value.payload_bytes,
        payload_crc: value.crc.expect("checksummed before its header is made"),
    }
}

impl Value {
    fn header_bytes(&self) -> usize {
        header_bytes(self.key.as_bytes().len())
    }

    /// Where the payload lies if the slot begins at `at`.
    fn payload_range(&self, at: usize) -> Range<usize> {
        let start = at + self.header_bytes();
        start..start + usize::try_from(self.payload_bytes).expect("payloads are smaller than slots")
    }
}
