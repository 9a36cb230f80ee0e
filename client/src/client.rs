//! A connected client: namespaces, counters, and the end of its background work.

use crate::{
    buffers::Buffers,
    calls,
    cluster::Cluster,
    control::{Control, DIRECTORY},
    core::{Core, Parts},
    endpoints::Endpoints,
    error::{CallError, CloseError, ConnectError, NamespaceError},
    namespace::Namespace,
    options::Options,
    stats::{Counters, Stats},
    view::NamespaceInfo,
};
use quarry_fabric::{FabricError, Pool, Provider};
use quarry_proto::{refusal::Refusal, v1};
use quarry_wire::{grant::Class, ids::WriterId};
use std::{sync::Arc, time::Duration};
use tokio::{runtime::Handle, time::Instant};

/// Time for background work to end in good order when the last clone was dropped without [`Client::close`], or was closed at the end of its time.
const CLOSES_WITHIN: Duration = Duration::from_secs(2);

/// A connection to a cluster. Cloning is cheap; clones share everything.
///
/// It must be made and used inside a tokio runtime with its timer. Background work (slabs in use, commits under way) goes on while there is a
/// clone of the client or of one of its namespaces. [`close`](Self::close) ends it in good order; dropping the last clone does so too, as far
/// as the runtime lives on.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
}

/// Held by every clone; its end is the client's.
#[derive(Debug)]
pub(crate) struct Shared {
    core: Arc<Core>,
    runtime: Handle,
}

impl Shared {
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// The runtime that the client was made in.
    pub(crate) const fn runtime(&self) -> &Handle {
        &self.runtime
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.core.closing.is_cancelled() {
            return;
        }
        let core = Arc::clone(&self.core);
        self.runtime.spawn(async move { core.shut_down(Instant::now() + CLOSES_WITHIN).await });
    }
}

/// A namespace to be made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceSpec {
    /// Its name: 1 to 64 bytes.
    pub name: String,
    /// Whether its values may be evicted.
    pub class: Class,
    /// Copies of each value, 1 to 3.
    pub copies: u8,
    /// Fewest copies with which a value is accepted; by default two, or one if there is one copy.
    pub least: Option<u8>,
    /// Most memory that its values have, in bytes, all copies counted; by default there is no limit. At its limit a namespace of class cache
    /// loses the values that were not read for longest.
    pub quota_bytes: Option<u64>,
}

impl NamespaceSpec {
    /// A namespace of class cache with two copies.
    pub fn cache(name: impl Into<String>) -> Self {
        Self { name: name.into(), class: Class::Cache, copies: 2, least: None, quota_bytes: None }
    }
}

impl Client {
    /// Connects: learns of the cluster from any of its meta nodes, and checks that libfabric can be used.
    ///
    /// # Errors
    /// [`ConnectError`] if nobody answers within [`Options::timeout`], what answers is another cluster, one side does not believe the other's
    /// certificate, libfabric lacks the provider, or an option cannot be.
    pub async fn connect(cluster: Cluster, options: Options) -> Result<Self, ConnectError> {
        options.check()?;
        let deadline = options.deadline();
        let trust = cluster.trust().map_err(|wrong| ConnectError::Credentials { why: wrong.to_string() })?;
        let counters = Arc::new(Counters::default());
        let control =
            Control::new(cluster, trust, options.attempt_timeout, Arc::clone(&options.entropy), Arc::clone(&counters))?;
        control.describe(deadline).await?;
        let provider = match &options.provider {
            Some(name) => Provider::named(name)?,
            None => Provider::detect()?,
        };
        let pool = || Pool::new(options.window_bytes);
        let (write_window, read_window, values) = (pool()?, pool()?, pool()?);
        let endpoints = Endpoints::new(
            provider,
            options.fabric_bind,
            Arc::clone(&write_window),
            [&read_window, &values].map(Arc::clone),
            Arc::clone(&counters),
        );
        let core = Core::new(Parts { options, control, endpoints, write_window, read_window, values, counters });
        Ok(Self { shared: Arc::new(Shared { core, runtime: Handle::current() }) })
    }

    /// A namespace by its name.
    ///
    /// # Errors
    /// [`CallError::UnknownNamespace`] inside [`NamespaceError::Call`] if there is none.
    pub async fn namespace(&self, name: &str) -> Result<Namespace, NamespaceError> {
        let deadline = self.core().deadline()?;
        if let Some(found) = self.known(name) {
            return Ok(found);
        }
        calls::call(self.core(), "namespace", self.core().control.describe(deadline)).await?;
        let unknown = || CallError::UnknownNamespace { what: name.to_owned() };
        self.known(name).ok_or_else(|| unknown().into())
    }

    /// Makes a namespace.
    ///
    /// # Errors
    /// [`NamespaceError::Exists`] if there is one with this name.
    pub async fn create_namespace(&self, spec: NamespaceSpec) -> Result<Namespace, NamespaceError> {
        calls::call(self.core(), "create_namespace", Box::pin(self.make_namespace(spec))).await
    }

    async fn make_namespace(&self, spec: NamespaceSpec) -> Result<Namespace, NamespaceError> {
        let core = self.core();
        let deadline = core.deadline()?;
        let make = |request| v1::CreateNamespaceRequest {
            request: Some(request),
            name: spec.name.clone(),
            class: v1::Class::from(spec.class).into(),
            copies: u32::from(spec.copies),
            least: u32::from(spec.least.unwrap_or(0)),
            quota_bytes: spec.quota_bytes.unwrap_or(0),
        };
        let made = core
            .control
            .command(DIRECTORY, "CreateNamespace", make, deadline, |mut meta, request| async move {
                meta.create_namespace(request).await
            })
            .await;
        let reply = match made {
            Ok(reply) => reply,
            Err(CallError::Refused(refusal)) => {
                return Err(match *refusal {
                    Refusal::NamespaceExists(it) => NamespaceError::Exists { name: it.name },
                    Refusal::Malformed(it) => {
                        NamespaceError::Invalid { field: it.field, expected: it.expected, found: it.found }
                    }
                    other => CallError::Refused(Box::new(other)).into(),
                });
            }
            Err(error) => return Err(error.into()),
        };
        core.control.heard(DIRECTORY, reply.applied_ms, None);
        let message =
            reply.namespace.ok_or_else(|| CallError::Untrusted { why: "no namespace in the reply".to_owned() })?;
        let info = NamespaceInfo::try_from(message).map_err(|wrong| CallError::Untrusted { why: wrong.to_string() })?;
        core.control.view().write().note_namespace(info.clone());
        // Learns the feed number: requests that name it find a shard that has heard of the namespace.
        core.control.describe(deadline).await?;
        Ok(Namespace::new(Arc::clone(&self.shared), info))
    }

    /// All namespaces, by name.
    ///
    /// # Errors
    /// [`NamespaceError::Call`] if the cluster does not answer.
    pub async fn list_namespaces(&self) -> Result<Vec<NamespaceInfo>, NamespaceError> {
        let core = self.core();
        calls::call(core, "list_namespaces", core.control.describe(core.deadline()?)).await?;
        Ok(core.control.view().read().namespaces().cloned().collect())
    }

    /// Memory of `bytes` bytes that is registered with the fabric once, for [`Namespace::get_into`]. Pages come when they are first touched.
    ///
    /// # Errors
    /// [`FabricError`] if there is not so much memory.
    pub fn buffers(&self, bytes: usize) -> Result<Buffers, FabricError> {
        Buffers::new(self.core(), bytes)
    }

    /// What was done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.core().counters.read()
    }

    /// The name under which this connection writes.
    #[must_use]
    pub fn writer(&self) -> WriterId {
        self.core().writer
    }

    /// Background tasks that are running now: openers, committers and keepers of slabs.
    #[must_use]
    pub fn background_tasks(&self) -> usize {
        self.core().tasks.len()
    }

    /// Ends the client in good order, for all clones: open slabs are sealed and background work ends. Calls that begin later fail with
    /// [`CallError::Closed`]; calls under way end by themselves, those that still need the fabric fail.
    ///
    /// # Errors
    /// [`CloseError`] if that was not done by the deadline; it is ended all the same.
    pub async fn close(self) -> Result<(), CloseError> {
        let core = self.core();
        let until = core.options.deadline().max(Instant::now() + CLOSES_WITHIN.min(core.options.timeout));
        match core.shut_down(until).await {
            0 => Ok(()),
            unfinished => Err(CloseError { unfinished }),
        }
    }

    fn core(&self) -> &Arc<Core> {
        self.shared.core()
    }

    fn known(&self, name: &str) -> Option<Namespace> {
        let info = self.core().control.view().read().namespace(name).cloned()?;
        Some(Namespace::new(Arc::clone(&self.shared), info))
    }
}
