//! The Quarry client: put and get values by one-sided RMA.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use quarry_client::{Client, Cluster, NamespaceSpec, Options};
//!
//! let client = Client::connect(Cluster::from_file("cluster.toml")?, Options::default()).await?;
//! let blocks = client.create_namespace(NamespaceSpec::cache("kv")).await?;
//! let version = blocks.put("layer-7/block-42", vec![7; 65_536]).await?;
//! let value = blocks.get("layer-7/block-42").await?.expect("it was just written");
//! assert_eq!((value.version, value.bytes.len()), (version, 65_536));
//! client.close().await?;
//! # Ok(())
//! # }
//! ```
//!
//! Bytes go straight from this process's registered memory into that of the data nodes, and back; meta and data nodes are called only to get
//! slabs, to commit what was written, and to learn where values are. What those calls answer is used only as far as its signatures chain to
//! the cluster's root key (*Nothing unsigned*), and bytes are shown only if they are the ones that were asked for (*No wrong value*).
//!
//! Where things are decided: `retry` (what to do after a failure; pure), `write` (slabs, frames, commits), `read` (descriptors, leases,
//! checks), `view` (what is believed), `control` (whom to call). Absent on purpose: objects larger than a slot, journaled copies, encryption.
#![warn(missing_docs)]

mod buffers;
mod calls;
mod checksum;
mod client;
mod cluster;
mod control;
mod core;
mod endpoints;
mod error;
mod host;
mod metrics;
mod namespace;
mod options;
mod pins;
mod reached;
mod read;
mod remove;
mod retry;
mod stats;
mod view;
mod write;

pub use buffers::{Buffer, Buffers};
pub use client::{Client, NamespaceSpec};
pub use cluster::{Cluster, ClusterError, Tls};
pub use error::{CallError, CloseError, ConnectError, DeleteError, GetError, NamespaceError, PinError, PutError};
pub use host::{Clock, Entropy, SystemClock, SystemEntropy};
pub use metrics::describe_metrics;
pub use namespace::{CopyStat, Got, Listed, Namespace, Page, PutItem, PutMode, Stat, Value};
pub use options::Options;
pub use pins::Pin;
pub use quarry_fabric::FabricError;
pub use quarry_proto::refusal::Refusal;
pub use quarry_wire::{
    grant::Class,
    ids::{ClusterUuid, Incarnation, NamespaceId, NodeId, WriterId},
    key::{Key, KeyLengthError},
    signed::PublicKey,
    version::{HybridClock, Version},
};
pub use stats::{PutTime, Stats};
pub use view::NamespaceInfo;
pub use write::{Reserved, ReservedMany};
