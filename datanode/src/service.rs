//! The gRPC server: turns messages into calls of the parts, and refusals into statuses.

use crate::{
    claims::{ArmRefusal, ConfirmRefusal},
    commit, confirm, damage, entropy,
    holdings::ArmError,
    moves,
    node::{Node, RegionSeat},
    resign,
    rotations::Rotated,
};
use quarry_proto::{
    convert, deadline,
    protocol::Check,
    refusal::Refusal,
    telemetry::Telemetry,
    v1::{
        self,
        arm_refused::Reason,
        data_node_server::{DataNode, DataNodeServer},
    },
};
use quarry_trust::Caller;
use quarry_wire::{
    grant::{Class, Grant, Purpose},
    ids::RegionIndex,
    limits::MESSAGE_BYTES_MAX,
};
use std::{sync::Arc, time::Duration};
use tokio::{
    net::TcpListener,
    time::{Instant, sleep, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status, metadata::MetadataMap, service::interceptor::InterceptedService,
    transport::server::TcpIncoming,
};
use tonic_health::server::HealthReporter;

/// How long a call may take whose caller does not say.
const DEADLINE_DEFAULT: Duration = Duration::from_secs(10);
/// Longest time that a caller may ask for.
const DEADLINE_MAX: Duration = Duration::from_secs(60);
/// Longest reason for a new key: it goes to the log.
const WHY_BYTES_MAX: usize = 256;

struct Service {
    node: Arc<Node>,
}

/// Serves until `drain`, then finishes the calls under way.
pub(crate) async fn serve(node: Arc<Node>, listener: TcpListener, drain: CancellationToken) {
    let (health, health_server) = tonic_health::server::health_reporter();
    let service = DataNodeServer::new(Service { node: Arc::clone(&node) })
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let door = node.trust.door(node.limits);
    let server = door
        .server()
        .layer(Telemetry::new(entropy::key()))
        .layer(node.counters.clone())
        .layer(door.guard())
        .layer(door.admission())
        .add_service(health_server)
        .add_service(InterceptedService::new(service, Check))
        .serve_with_incoming_shutdown(
            door.incoming(TcpIncoming::from(listener).with_nodelay(Some(true))),
            drain.clone().cancelled_owned(),
        );
    let watched = tokio::spawn(report_health(node, health, drain));
    if let Err(error) = server.await {
        tracing::error!(%error, "the gRPC server ended");
    }
    watched.abort();
}

/// SERVING while every region is registered and the node does not stop.
async fn report_health(node: Arc<Node>, health: HealthReporter, drain: CancellationToken) {
    let mut standing = node.standing.subscribe();
    loop {
        let ready = standing.borrow_and_update().serves(node.regions.len());
        let status = if ready && !drain.is_cancelled() {
            tonic_health::ServingStatus::Serving
        } else {
            tonic_health::ServingStatus::NotServing
        };
        for name in ["", <DataNodeServer<Service> as tonic::server::NamedService>::NAME] {
            health.set_service_status(name, status).await;
        }
        tokio::select! {
            changed = standing.changed() => if changed.is_err() { return },
            () = drain.cancelled(), if !drain.is_cancelled() => {}
            () = sleep(DEADLINE_MAX) => {}
        }
    }
}

#[tonic::async_trait]
impl DataNode for Service {
    async fn arm(&self, request: Request<v1::ArmRequest>) -> Result<Response<v1::ArmReply>, Status> {
        let deadline = until(request.metadata());
        let caller = Caller::of(request.extensions());
        let request = request.into_inner();
        if self.node.draining() {
            return Err(not_ready("the node is stopping", 1_000).into());
        }
        let writer = convert::writer_id(&request.writer)?;
        caller.is_writer(writer, "Arm")?;
        let signed = convert::signed::<Grant>(&request.grant)?;
        tracing::Span::current().record("shard", signed.statement.id.shard.0);
        let grant = self.node.verify(signed, deadline).await.map_err(|error| untrusted(&error))?;
        if grant.purpose != Purpose::Write {
            return Err(Refusal::malformed("grant.purpose", "a client's write", "one of the nodes' own").into());
        }
        cache_only(grant.class)?;
        let grant = Arc::new(grant);
        let armed = self.node.holdings.lock().arm(self.node.clock.now(), &grant, writer);
        let lent = armed.map_err(|error| arm_refusal(&error))?;
        Ok(Response::new(v1::ArmReply {
            lane_address: lent.address.into(),
            write_key: lent.key,
            base: lent.base,
            provider: self.node.provider.clone(),
        }))
    }

    async fn commit(&self, request: Request<v1::CommitRequest>) -> Result<Response<v1::CommitReply>, Status> {
        let deadline = until(request.metadata());
        let caller = Caller::of(request.extensions());
        let request = request.into_inner();
        caller.is_writer(convert::writer_id(&request.writer)?, "Commit")?;
        let entries = request.entries.len();
        let reply = commit::commit(Arc::clone(&self.node), request, deadline).await;
        self.node.meters.committed(entries, reply.is_ok());
        Ok(Response::new(reply?))
    }

    async fn confirm(&self, request: Request<v1::ConfirmRequest>) -> Result<Response<v1::ConfirmReply>, Status> {
        let request = request.into_inner();
        let grant = convert::grant_id(request.grant)?;
        let writer = convert::writer_id(&request.writer)?;
        commit::check_count(request.entries.len())?;
        let verdict =
            confirm::confirm(&self.node, grant, writer, &request.entries).map_err(|why| confirm_refusal(&why))?;
        let refused = verdict.refused.into_keys().filter_map(|entry| u32::try_from(entry).ok()).collect();
        Ok(Response::new(v1::ConfirmReply { attested: verdict.attested, refused }))
    }

    async fn move_copies(
        &self,
        request: Request<v1::MoveCopiesRequest>,
    ) -> Result<Response<v1::MoveCopiesReply>, Status> {
        let deadline = until(request.metadata());
        Ok(Response::new(moves::carry_out(&self.node, request.into_inner(), deadline).await?))
    }

    async fn close(&self, request: Request<v1::CloseRequest>) -> Result<Response<v1::CloseReply>, Status> {
        let caller = Caller::of(request.extensions());
        let request = request.into_inner();
        let grant = convert::grant_id(request.grant)?;
        let writer = convert::writer_id(&request.writer)?;
        caller.is_writer(writer, "Close")?;
        let closed = self.node.holdings.lock().close(self.node.clock.now(), grant, writer);
        closed.map_err(|why| confirm_refusal(&why))?;
        Ok(Response::new(v1::CloseReply {}))
    }

    async fn region_record(
        &self,
        request: Request<v1::RegionRecordRequest>,
    ) -> Result<Response<v1::RegionRecordReply>, Status> {
        let index = RegionIndex(request.into_inner().region);
        let holdings = self.node.holdings.lock();
        let (incarnation, record) = holdings.standing(index).unzip();
        Ok(Response::new(v1::RegionRecordReply {
            incarnation: incarnation.map(Into::into),
            record: record.flatten().map(|record| record.encode().into()).unwrap_or_default(),
        }))
    }

    async fn report_damage(
        &self,
        request: Request<v1::ReportDamageRequest>,
    ) -> Result<Response<v1::ReportDamageReply>, Status> {
        let deadline = until(request.metadata());
        Ok(Response::new(damage::report(&self.node, request.into_inner(), deadline).await?))
    }

    // For administrators.
    async fn rotate_region(
        &self,
        request: Request<v1::RotateRegionRequest>,
    ) -> Result<Response<v1::RotateRegionReply>, Status> {
        let deadline = until(request.metadata());
        Ok(Response::new(rotate(&self.node, request.into_inner(), deadline).await?))
    }

    // For administrators.
    async fn rotate_key(&self, request: Request<v1::RotateKeyRequest>) -> Result<Response<v1::RotateKeyReply>, Status> {
        let deadline = until(request.metadata());
        Ok(Response::new(resign::rotate_key(&self.node, request.into_inner().why, deadline).await?))
    }

    async fn node_status(&self, _: Request<v1::NodeStatusRequest>) -> Result<Response<v1::NodeStatusReply>, Status> {
        Ok(Response::new(status(&self.node)))
    }
}

/// Asks for new read keys and waits until the directory has their records.
pub(crate) async fn rotate(
    node: &Node,
    asked: v1::RotateRegionRequest,
    deadline: Instant,
) -> Result<v1::RotateRegionReply, Refusal> {
    check_why(&asked.why)?;
    let wanted = |seat: &&RegionSeat| asked.region.is_none_or(|index| seat.id.index == RegionIndex(index));
    let seats: Vec<&RegionSeat> = node.regions.iter().filter(wanted).collect();
    if seats.is_empty() {
        let expected = format_args!("0 to {}", node.regions.len() - 1);
        return Err(Refusal::malformed("region", expected, asked.region.unwrap_or_default()));
    }
    let mut done = Vec::with_capacity(seats.len());
    for seat in seats {
        tracing::info!(region = %seat.id, why = asked.why, "a new read key is asked for");
        done.push((seat.id, seat.rotations.ask()));
        seat.bell.notify_one();
    }
    let mut regions = Vec::with_capacity(done.len());
    for (region, done) in done {
        let Ok(Ok(Rotated { incarnation, epoch })) = timeout_at(deadline, done).await else {
            let last = node.standing.borrow().last.clone();
            let why = format!(
                "the directory does not have the new key of {region} yet, the node goes on trying; last heard: {last}"
            );
            return Err(Refusal::Indeterminate(v1::Indeterminate { why }));
        };
        regions.push(v1::RegionEpoch {
            region: Some(region.into()),
            incarnation: Some(incarnation.into()),
            epoch: epoch.0,
        });
    }
    Ok(v1::RotateRegionReply { regions })
}

pub(crate) fn check_why(why: &str) -> Result<(), Refusal> {
    if why.len() <= WHY_BYTES_MAX {
        return Ok(());
    }
    Err(Refusal::malformed("why", format_args!("at most {WHY_BYTES_MAX} bytes"), format_args!("{} bytes", why.len())))
}

/// What the node says of itself.
pub(crate) fn status(node: &Node) -> v1::NodeStatusReply {
    let holdings = node.holdings.lock();
    let regions = holdings.lives().into_iter();
    v1::NodeStatusReply {
        node: node.id.0,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        regions: regions
            .map(|(region, life)| v1::RegionLife { region: Some(region.into()), incarnation: Some(life.into()) })
            .collect(),
        lanes: holdings.open_lanes() as u64,
        claims_open: holdings.open_claims() as u64,
        counters: node.counters.read(),
        records: holdings.records().into_iter().map(Into::into).collect(),
        admin_address: node.admin_address.clone().unwrap_or_default(),
    }
}

/// Refuses what needs a journal.
pub(crate) fn cache_only(class: Class) -> Result<(), Refusal> {
    match class {
        Class::Cache => Ok(()),
        Class::Durable => {
            let expected = "cache (durable namespaces need the journal, which this node does not have)";
            Err(Refusal::malformed("grant.class", expected, "durable"))
        }
    }
}

pub(crate) fn not_ready(why: &str, retry_after_ms: u64) -> Refusal {
    Refusal::NotReady(v1::NotReady { why: why.to_owned(), retry_after_ms })
}

pub(crate) fn untrusted(why: &dyn ToString) -> Refusal {
    Refusal::Untrusted(v1::Untrusted { why: why.to_string() })
}

pub(crate) fn confirm_refusal(why: &ConfirmRefusal) -> Refusal {
    match why {
        ConfirmRefusal::UnknownGrant { grant } => {
            Refusal::UnknownGrant(v1::UnknownGrant { grant: Some((*grant).into()) })
        }
        ConfirmRefusal::Writer { .. } => untrusted(why),
        ConfirmRefusal::NoSuchSlot { .. } | ConfirmRefusal::Superseded { .. } => {
            Refusal::malformed("slot", "one that the grant still holds", why)
        }
    }
}

pub(crate) fn arm_refusal(error: &ArmError) -> Refusal {
    let refused = |reason: Reason, expected: String, found: String| {
        Refusal::ArmRefused(v1::ArmRefused { reason: reason.into(), expected, found })
    };
    let why = match error {
        ArmError::Refused(why) => why,
        ArmError::Fabric(error) => {
            tracing::warn!(%error, "a lane or write region cannot be opened");
            return refused(Reason::NoLane, "a lane".to_owned(), error.to_string());
        }
    };
    let found = why.to_string();
    match why {
        ArmRefusal::NotAHolder { grant, .. } => refused(Reason::NotAHolder, format!("a holder of {grant}"), found),
        ArmRefusal::Writer { owner, .. } => refused(Reason::Writer, owner.to_string(), found),
        ArmRefusal::NoIncarnation { .. } => not_ready(&found, 100),
        ArmRefusal::Incarnation { current, .. } => refused(Reason::Incarnation, current.to_string(), found),
        ArmRefusal::OutOfBounds { extent, .. } => refused(Reason::OutOfBounds, format!("within {extent:?}"), found),
        ArmRefusal::Lending { current, .. } => refused(Reason::Lending, format!("{current} or later"), found),
        ArmRefusal::LowerToken { highest, .. } => refused(Reason::LowerToken, format!("above {highest}"), found),
        ArmRefusal::Closed { .. } => refused(Reason::GrantClosed, "a grant not yet closed".to_owned(), found),
        ArmRefusal::LaneClosed { .. } => refused(Reason::LaneClosed, "an open lane".to_owned(), found),
        ArmRefusal::NoLane { limit } => refused(Reason::NoLane, format!("a free lane of {limit}"), found),
    }
}

/// When the caller stops waiting, less a little for the way back.
fn until(metadata: &MetadataMap) -> Instant {
    let wait = deadline::of(metadata.as_ref()).unwrap_or(DEADLINE_DEFAULT).min(DEADLINE_MAX);
    Instant::now() + wait - wait / 20
}
