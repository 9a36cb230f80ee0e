//! What a process that runs a data node asks it: is it ready, what does it say of itself.

use crate::{metrics, node::Node, service};
use quarry_proto::v1;
use std::sync::Arc;

/// A handle for asking a [`DataNode`](crate::DataNode) while it runs. Cloning is cheap.
#[derive(Clone)]
pub struct DataProbe(Arc<Node>);

impl std::fmt::Debug for DataProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DataProbe").field(&self.0.id).finish()
    }
}

impl DataProbe {
    pub(crate) const fn new(node: Arc<Node>) -> Self {
        Self(node)
    }

    /// Whether the directory has a record of every region, what the node signs counts, and it does not stop.
    ///
    /// # Errors
    /// What is missing, as a sentence.
    pub fn ready(&self) -> Result<(), String> {
        let standing = self.0.standing.borrow();
        if let Some(forgotten) = standing.forgotten() {
            return Err(forgotten.to_owned());
        }
        if self.0.draining() {
            return Err("the node drains".to_owned());
        }
        if let Some(serial) = self.0.membership.revoked() {
            return Err(format!("certificate {serial}, which the node signs under, is revoked"));
        }
        let (recorded, regions) = (standing.recorded.len(), self.0.regions.len());
        if standing.serves(regions) {
            return Ok(());
        }
        Err(format!("{recorded} of {regions} regions are registered; last heard: {:?}", standing.last))
    }

    /// What the node answers to a call of `NodeStatus`.
    #[must_use]
    pub fn status(&self) -> v1::NodeStatusReply {
        service::status(&self.0)
    }

    /// Sets the gauges that tell where the node stands. To be called before its metrics are shown.
    pub fn record_metrics(&self) {
        metrics::stand(&self.0);
    }
}
