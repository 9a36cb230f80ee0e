//! Finding out about the whole cluster from one meta node: all meta nodes are asked for their status, then for their counters.
//!
//! Works without a leader: who does not answer in time has a row that says so. However many look, the cluster is asked at most once a second.

use super::view::{self, Heard};
use quarry::{
    admin,
    scrape::{Scrape, get},
};
use quarry_meta::MetaProbe;
use quarry_trust::Trust;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{sync::Mutex, task::spawn_blocking, time::Instant};

/// What was gathered is shown for so long.
const FRESH: Duration = Duration::from_secs(1);
/// How long a meta node may take for one answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Cells in which the memory of one region is drawn.
const CELLS: u32 = 512;

/// What was gathered last.
#[derive(Default)]
pub(crate) struct Gathered(Mutex<Option<(Instant, Arc<str>)>>);

impl Gathered {
    /// The cluster as JSON. `metrics` renders those of this process.
    pub(crate) async fn page(
        &self,
        probe: &MetaProbe,
        trust: &Trust,
        metrics: impl FnOnce() -> String + Send + 'static,
    ) -> Arc<str> {
        // Held while asking, so that who comes meanwhile waits for the same answer.
        let mut last = self.0.lock().await;
        if let Some((at, page)) = &*last
            && at.elapsed() < FRESH
        {
            return Arc::clone(page);
        }
        let page: Arc<str> = gather(probe, trust, metrics).await.to_string().into();
        *last = Some((Instant::now(), Arc::clone(&page)));
        page
    }
}

async fn gather(
    probe: &MetaProbe,
    trust: &Trust,
    metrics: impl FnOnce() -> String + Send + 'static,
) -> serde_json::Value {
    let asked = probe.clone();
    // All three walk over all slots.
    let counted = spawn_blocking(move || (asked.status(), asked.maps(CELLS), metrics()));
    let (own, maps, metrics) = counted.await.expect("counting has no reason to panic");
    let metas = probe.metas();
    let others = metas.iter().filter(|(node, _)| node.0 != own.node).map(|(_, address)| address.clone());
    let others: Vec<String> = others.collect();
    let mut answers: BTreeMap<String, _> =
        others.iter().cloned().zip(admin::status_all(trust, &others, PATIENCE).await).collect();
    let mut heard = Vec::new();
    let mut counting = Vec::new();
    for (node, address) in metas {
        let status = match answers.remove(&address) {
            Some(Ok(status)) if status.node == node.0 => Ok(status),
            Some(Ok(status)) => Err(format!("node {} answers there", status.node)),
            Some(Err(wrong)) => Err(wrong.to_string()),
            None => Ok(own.clone()),
        };
        let counted = match &status {
            Ok(status) if node.0 != own.node => tokio::spawn(counters(node.0, status.admin_address.clone())),
            Ok(_) => {
                let own = Scrape::parse(&metrics).map_err(|wrong| wrong.to_string());
                tokio::spawn(async move { own })
            }
            Err(_) => tokio::spawn(async { Err("the node does not answer".to_owned()) }),
        };
        heard.push((node, address, status));
        counting.push(counted);
    }
    let mut all = Vec::new();
    for ((node, address, status), counted) in heard.into_iter().zip(counting) {
        let counters = counted.await.expect("reading counters does not panic");
        all.push(Heard { node, address, status, counters });
    }
    view::cluster(&own, &all, &maps)
}

/// The metrics of a meta node, if it is that node that shows them: an admin port that listens on its own host alone is somebody else's here.
async fn counters(node: u64, admin: String) -> Result<Scrape, String> {
    if admin.is_empty() {
        return Err("it shows no metrics".to_owned());
    }
    let page = get(&admin, "/metrics", PATIENCE).await.map_err(|wrong| wrong.to_string())?;
    let scrape = Scrape::parse(&page.body).map_err(|wrong| wrong.to_string())?;
    if scrape.first("quarry_build_info", &[("node", &node.to_string())]).is_some() {
        Ok(scrape)
    } else {
        Err(format!("its admin port {admin} is not reached from here"))
    }
}
