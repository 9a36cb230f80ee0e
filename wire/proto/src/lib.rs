//! The gRPC services of Quarry: messages, refusals, the version check of each call, request ids, byte counters and metrics of calls.
//!
//! Transport only. What is signed is defined in `quarry-wire` and travels here as bytes. Conversions between messages and the checked types
//! of `quarry-wire` stand in [`convert`]: unchecked input becomes a checked type once, at the door.

pub mod call_id;
pub mod convert;
pub mod counters;
pub mod deadline;
pub mod protocol;
pub mod refusal;
pub mod telemetry;

/// The generated messages and services (`proto/quarry.proto`).
#[expect(clippy::allow_attributes, clippy::use_self, unused_qualifications, reason = "generated code")]
pub mod v1 {
    tonic::include_proto!("quarry.v1");
}
