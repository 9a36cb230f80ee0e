//! Safe one-sided RMA on libfabric: memory, registrations, endpoints, and operations as futures.
//!
//! Decides how libfabric is driven: which provider, which flags, who makes progress, who owns a buffer while the network may
//! touch it. Leaves to others what the bytes mean, which keys are handed to whom, and whether to try again.
//!
//! What it keeps, and what callers build on:
//!
//! - **Completion means visible.** A write that returns `Ok` is in the target's memory (`FI_DELIVERY_COMPLETE` on each).
//! - **Buffers belong to the operation** until it completed or its endpoint is closed; dropping the future changes nothing. Bytes
//!   that peers can reach are copied, never borrowed ([`Memory`]); those of a [`Pool`], which only our own operations can reach, are
//!   looked at in place by whoever owns their [`Span`] while no operation does.
//! - **Closing an endpoint is the fence** (*Fenced writers*): after [`Endpoint::close`] no remote byte lands through it. Closing
//!   a [`Registration`] is *not* one: it stops new operations, but one that has started goes on landing. So an endpoint has a
//!   libfabric domain of its own, since a key is valid on every endpoint of its domain.
//! - **Every operation ends.** At its deadline an operation that is still under way closes its endpoint and returns; the buffer
//!   is free again, and others in flight there fail with [`OperationError::Closed`]. [`ClientEndpoint`] opens the next one.
//! - **Memory outlives whoever may write it**: an endpoint holds all memory that was registered for remote access on it until it
//!   is closed, also after the registration is.
//!
//! Absent on purpose: retries of operations, two-sided messages, shared memory providers (their keys protect nothing).
#![warn(missing_docs)]
#![expect(unsafe_code, reason = "this crate is where Quarry calls C")]

mod address;
mod carrier;
mod child;
mod client;
mod double;
mod endpoint;
mod error;
mod heap;
mod memory;
mod metrics;
mod operation;
mod pieces;
mod poller;
mod pool;
mod provider;
mod raw;
pub mod reference;
mod registration;
mod signals;
mod wait;

pub use address::FabricAddress;
pub use child::without_our_descriptors;
pub use client::{ClientEndpoint, LocalBuffer};
pub use double::{DoubleNetwork, Faults};
pub use endpoint::{Endpoint, EndpointConfig, Peer};
pub use error::{FabricError, OperationError};
pub use heap::keep_freed_memory;
pub use memory::Memory;
pub use metrics::describe_metrics;
pub use pieces::{PIECES_MAX, Pieces};
pub use pool::{Pool, SPAN_ALIGN, SoleSpan, Span};
pub use provider::{Provider, library_version};
pub use registration::{Access, LocalSpan, PoolRegistration, Registration, RemoteSpan};
pub use signals::reclaim_signals;
pub use wait::Wait;
