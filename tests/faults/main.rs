//! Faults: writers and data nodes that are stopped, killed, late or forging, and memory that lies.
//!
//! Proves *Fenced writers*, *No wrong value*, *Nothing unsigned* and *Nothing leaks* on real processes and real libfabric: what may not be
//! reached is tried, and the memory is looked at. Failures of the control plane stand in the suite `crash`.
#![expect(clippy::unwrap_used, reason = "tests may fail by panicking, helpers of tests too")]

mod damage;
mod fences;
mod forged;
mod nodes;
mod writers;

/// A cluster of one data node whose regions have full extents: the space that one grant leaves is where the next one is placed.
async fn one_node() -> quarry_tests::TestCluster {
    quarry_tests::TestCluster::start_with(|spec| {
        spec.data_nodes = 1;
        spec.region_bytes = vec![1 << 30];
    })
    .await
}

/// The only data node of [`one_node`].
const NODE: quarry_wire::ids::NodeId = quarry_wire::ids::NodeId(101);
