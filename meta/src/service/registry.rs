//! Registry: data nodes register their regions, say where these can be read, and show that they are alive; `resign` is what follows a new key.

use super::{Service, damage, resign, strange};
use crate::{
    core::{Core, not_made},
    door,
};
use quarry_meta_state::directory::{
    DirectoryCommand, DirectoryOutcome, Labels, nodes::NodeRefusal, regions::RegionRefusal,
};
use quarry_proto::{
    convert::{self, required},
    refusal::Refusal,
    v1::{self, registry_server::Registry},
};
use quarry_trust::Caller;
use quarry_wire::{
    certificate::{Certificate, Role},
    ids::{Incarnation, NodeId, RegionId},
    limits::{REGION_BYTES_MAX, REGION_BYTES_MIN},
    signed::Signed,
};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

/// Most regions in one heartbeat.
const REGIONS_MAX: usize = 4096;

#[tonic::async_trait]
impl Registry for Service {
    async fn register_region(
        &self,
        request: Request<v1::RegisterRegionRequest>,
    ) -> Result<Response<v1::RegisterRegionReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(register(self.core(), request.into_inner(), &caller, deadline)).await
    }

    async fn record_region(
        &self,
        request: Request<v1::RecordRegionRequest>,
    ) -> Result<Response<v1::RecordRegionReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(record(self.core(), request.into_inner(), &caller, deadline)).await
    }

    async fn heartbeat(&self, request: Request<v1::HeartbeatRequest>) -> Result<Response<v1::HeartbeatReply>, Status> {
        let caller = Caller::of(request.extensions());
        self.call(async {
            caller.is_node(Role::DataNode, NodeId(request.get_ref().node), "Heartbeat")?;
            heartbeat(self.core(), request.into_inner())
        })
        .await
    }

    async fn admit_certificate(
        &self,
        request: Request<v1::AdmitCertificateRequest>,
    ) -> Result<Response<v1::AdmitCertificateReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(resign::admit(self.core(), request.into_inner(), &caller, deadline)).await
    }

    async fn batches(&self, request: Request<v1::BatchesRequest>) -> Result<Response<v1::BatchesReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(resign::batches(self.core(), request.into_inner(), &caller, deadline)).await
    }

    async fn resign(&self, request: Request<v1::ResignRequest>) -> Result<Response<v1::ResignReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(resign::resign(self.core(), request.into_inner(), &caller, deadline)).await
    }

    async fn check_copy(&self, request: Request<v1::CheckCopyRequest>) -> Result<Response<v1::CheckCopyReply>, Status> {
        let deadline = door::deadline(&request, self.core().config.call_deadline);
        let caller = Caller::of(request.extensions());
        self.call(damage::check_copy(self.core(), request.into_inner(), &caller, deadline)).await
    }
}

async fn register(
    core: &Core,
    asked: v1::RegisterRegionRequest,
    caller: &Caller,
    deadline: Instant,
) -> Result<v1::RegisterRegionReply, Refusal> {
    let region: RegionId = required("region", asked.region)?.into();
    caller.is_node(Role::DataNode, region.node, "RegisterRegion")?;
    core.directory.leads()?;
    core.made()?;
    let certificate: Signed<Certificate> = convert::signed(&asked.certificate)?;
    let said = &certificate.statement;
    if said.node != region.node || said.role != Role::DataNode {
        let why = format!("the certificate is of {} as {}, the region is of {}", said.node, said.role, region.node);
        return Err(Refusal::Untrusted(v1::Untrusted { why }));
    }
    let untrusted = |error: quarry_wire::keyring::TrustError| {
        Refusal::Untrusted(v1::Untrusted { why: format!("certificate {}: {error}", said.serial) })
    };
    core.keyring()?.as_ref().clone().admit(&certificate).map_err(untrusted)?;
    let life = u128::from_le_bytes(convert::array("boot", &asked.boot)?);
    let (node, index, bytes) = (region.node, region.index, asked.length);
    let admit = DirectoryCommand::AdmitCertificate(certificate.clone());
    let announce = DirectoryCommand::AnnounceNode { node, address: asked.address };
    let label = DirectoryCommand::LabelNode { node, labels: Labels { host: asked.host, zone: asked.zone } };
    let register = DirectoryCommand::RegisterRegion { node, index, bytes, life };
    // Asked for together and in this order, so they share an entry.
    let (admitted, announced, labelled, registered) = tokio::join!(
        biased;
        core.directory.propose(admit, deadline),
        core.directory.propose(announce, deadline),
        core.directory.propose(label, deadline),
        core.directory.propose(register, deadline),
    );
    for done in [admitted?, announced?, labelled?] {
        match done.outcome {
            DirectoryOutcome::Node(Ok(_)) => {}
            DirectoryOutcome::Node(Err(refusal)) => return Err(node_refused(refusal)),
            other => return Err(strange(&other)),
        }
    }
    let incarnation = match registered?.outcome {
        DirectoryOutcome::Region(Ok(incarnation)) => incarnation,
        DirectoryOutcome::Region(Err(refusal)) => return Err(region_refused(refusal, region, None)),
        other => return Err(strange(&other)),
    };
    // It registered just now: that is as good as a heartbeat.
    core.membership.hear(node, Instant::now());
    Ok(v1::RegisterRegionReply {
        incarnation: Some(incarnation.into()),
        cluster: core.config.cluster.0.to_vec().into(),
        generation: core.directory.read(|directory| directory.generation().0),
    })
}

async fn record(
    core: &Core,
    asked: v1::RecordRegionRequest,
    caller: &Caller,
    deadline: Instant,
) -> Result<v1::RecordRegionReply, Refusal> {
    let record: Signed<quarry_wire::region::RegionRecord> = convert::signed(&asked.record)?;
    let (region, named) = (record.statement.region, record.statement.incarnation);
    caller.is_node(Role::DataNode, region.node, "RecordRegion")?;
    core.directory.leads()?;
    // The machine checks the signature too; here it costs no entry.
    core.keyring()?
        .verify(record.clone())
        .map_err(|error| Refusal::Untrusted(v1::Untrusted { why: format!("the record of {region}: {error}") }))?;
    match core.directory.propose(DirectoryCommand::RecordRegion(record), deadline).await?.outcome {
        DirectoryOutcome::Record(Ok(feed)) => Ok(v1::RecordRegionReply { feed: Some(feed.into()) }),
        DirectoryOutcome::Record(Err(refusal)) => Err(region_refused(refusal, region, Some(named))),
        other => Err(strange(&other)),
    }
}

fn heartbeat(core: &Core, asked: v1::HeartbeatRequest) -> Result<v1::HeartbeatReply, Refusal> {
    core.made()?;
    if asked.regions.len() > REGIONS_MAX {
        return Err(door::too_large("regions", REGIONS_MAX, asked.regions.len()));
    }
    let node = NodeId(asked.node);
    let (own, is_retired) = core.directory.read(|directory| (directory.generation(), directory.is_retired(node)));
    // What this node knows belongs to a history that was given up, if the caller has seen a later one.
    let is_old = asked.seen.is_some_and(|seen| seen.generation > own.0);
    if is_retired && !is_old {
        return Err(forgotten(node));
    }
    let mut void = Vec::new();
    let known = core.directory.read(|directory| {
        for life in asked.regions {
            let region: RegionId = required("region", life.region)?.into();
            let incarnation: Incarnation = required("incarnation", life.incarnation)?.into();
            if region.node != node {
                return Err(Refusal::malformed("regions", format_args!("regions of {node}"), region));
            }
            // A region or a life that this replica has not heard of yet is left alone.
            let over = directory.region(region).is_some_and(|held| {
                held.state.incarnation > incarnation || (held.state.incarnation == incarnation && !held.state.up)
            });
            if over {
                void.push(v1::RegionLife { region: Some(region.into()), incarnation: Some(incarnation.into()) });
            }
        }
        Ok(directory.regions_of(node).next().is_some())
    })?;
    if known {
        core.membership.hear(node, Instant::now());
    }
    Ok(v1::HeartbeatReply {
        void,
        changes: core.changes(asked.seen),
        generation: core.directory.read(|directory| directory.generation().0),
        groups: core.groups(),
        metas: core.metas(),
    })
}

fn forgotten(node: NodeId) -> Refusal {
    let why =
        format!("{node} was forgotten, its number is never used again: give it another number, with a key of its own");
    Refusal::node_refused(v1::node_refused::Reason::Retired, node.0, why)
}

/// A certificate or an announcement that was not taken.
pub(super) fn node_refused(refusal: NodeRefusal) -> Refusal {
    match refusal {
        NodeRefusal::NotInitialised => not_made(),
        NodeRefusal::Untrusted { why } => Refusal::Untrusted(v1::Untrusted { why }),
        NodeRefusal::UnknownNode { .. } => Refusal::Untrusted(v1::Untrusted { why: refusal.to_string() }),
        NodeRefusal::Retired { node } => forgotten(node),
        NodeRefusal::Decommissioned { node } => {
            Refusal::node_refused(v1::node_refused::Reason::Decommissioned, node.0, &refusal)
        }
        NodeRefusal::Alive { node, .. } => Refusal::node_refused(v1::node_refused::Reason::Alive, node.0, &refusal),
        NodeRefusal::Label { found } => {
            Refusal::malformed("labels", "at most 64 bytes each", format_args!("{found} bytes"))
        }
        NodeRefusal::Address { found } => {
            Refusal::malformed("address", "1 to 256 bytes", format_args!("{found} bytes"))
        }
    }
}

fn region_refused(refusal: RegionRefusal, region: RegionId, named: Option<Incarnation>) -> Refusal {
    match refusal {
        RegionRefusal::NotInitialised => not_made(),
        RegionRefusal::UnknownNode { .. } | RegionRefusal::Untrusted { .. } => {
            Refusal::Untrusted(v1::Untrusted { why: refusal.to_string() })
        }
        RegionRefusal::Retired { node } => forgotten(node),
        RegionRefusal::MetaNode { node } => {
            Refusal::node_refused(v1::node_refused::Reason::OtherRole, node.0, &refusal)
        }
        RegionRefusal::Decommissioned { node } => {
            Refusal::node_refused(v1::node_refused::Reason::Decommissioned, node.0, &refusal)
        }
        RegionRefusal::Length { step, found } => {
            let range = format_args!("{REGION_BYTES_MIN} to {REGION_BYTES_MAX} bytes");
            Refusal::malformed("length", format_args!("{range}, a multiple of {step} at that size"), found)
        }
        RegionRefusal::LengthChanged { expected, found, .. } => {
            let expected = format_args!("{expected} as registered (a region of another length takes another index)");
            Refusal::malformed("length", expected, found)
        }
        RegionRefusal::StaleIncarnation { expected, found, .. } => Refusal::StaleIncarnation(v1::StaleIncarnation {
            region: Some(region.into()),
            expected: Some(expected.into()),
            found: Some(found.into()),
        }),
        RegionRefusal::UnknownRegion { .. } => Refusal::StaleIncarnation(v1::StaleIncarnation {
            region: Some(region.into()),
            expected: None,
            found: named.map(Into::into),
        }),
        RegionRefusal::StaleEpoch { held, found } => Refusal::malformed("epoch", format_args!("above {held}"), found),
        RegionRefusal::Field { ref field, found } => Refusal::malformed(field, "a field that fits", found),
    }
}
