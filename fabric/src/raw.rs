//! libfabric's objects as owned handles, and each call that we make, once.
//!
//! Decides flags and attributes; knows nothing of operations' lives, deadlines or who polls. Every object is opened with
//! `FI_THREAD_SAFE`, so handles are `Send` and `Sync`; what remains to the callers is the order of closing: endpoint, queue,
//! address vector, registrations, domain, fabric, information. Field order does that within one struct, `Arc`s between them.
//!
//! Calls that touch a domain's registrations or drive its endpoints exclude each other by [`Domain::calls`], in spite of `FI_THREAD_SAFE`:
//! `net` of libfabric 1.17 does not lock its tree of keys where it is changed, and asks for a queue's state without a lock (found and mended upstream in 2023:
//! <https://github.com/ofiwg/libfabric/issues/9148>). Without ours, processes crashed or hung. It costs little: the provider itself lets
//! one thread at a time into a domain to post or to make progress.

use crate::{
    FabricAddress, FabricError, OperationError, PIECES_MAX,
    address::ADDRESS_BYTES_MAX,
    error::{errno_hint, errno_name},
};
use libfabric_sys as ffi;
use parking_lot::Mutex;
use std::{
    ffi::{CStr, CString, c_void},
    net::IpAddr,
    os::fd::RawFd,
    ptr::{self, NonNull},
    sync::Arc,
};

/// The interface version that we are written for.
const API: u32 = (1 << 16) | 17;
/// Room for completions; more than operations can be in flight on one endpoint.
const QUEUE_ENTRIES: usize = 1024;
/// Completions read in one call.
const BATCH: usize = 32;

/// Which local address an endpoint is to have.
pub(crate) struct Source {
    pub(crate) ip: IpAddr,
    pub(crate) port: Option<u16>,
}

/// Objects that begin with a `struct fid`, by which libfabric closes them.
pub(crate) trait Fid {}
impl Fid for ffi::fid_fabric {}
impl Fid for ffi::fid_domain {}
impl Fid for ffi::fid_av {}
impl Fid for ffi::fid_cq {}
impl Fid for ffi::fid_ep {}
impl Fid for ffi::fid_mr {}

/// An open libfabric object, closed on drop.
pub(crate) struct Handle<T: Fid> {
    object: NonNull<T>,
}

// SAFETY: we ask for FI_THREAD_SAFE, so any thread may call libfabric with any object.
unsafe impl<T: Fid> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T: Fid> Sync for Handle<T> {}

impl<T: Fid> Handle<T> {
    /// Runs a libfabric constructor and takes what it made.
    fn open(call: &'static str, make: impl FnOnce(*mut *mut T) -> i32) -> Result<Self, FabricError> {
        let mut object = ptr::null_mut();
        check(call, make(&raw mut object))?;
        let object = NonNull::new(object).ok_or_else(|| library_error(call, libc::EIO))?;
        Ok(Self { object })
    }

    fn raw(&self) -> *mut T {
        self.object.as_ptr()
    }

    fn fid(&self) -> *mut ffi::fid {
        self.raw().cast()
    }

    /// Closes now and tells how it went; 0 is success.
    fn close(self) -> i32 {
        let fid = self.fid();
        std::mem::forget(self);
        // SAFETY: the object is open, and nobody else has this handle any more.
        unsafe { ffi::fi_close(fid) }
    }
}

impl<T: Fid> Drop for Handle<T> {
    fn drop(&mut self) {
        // SAFETY: the object is open, and nobody else has this handle any more.
        let rc = unsafe { ffi::fi_close(self.fid()) };
        if rc != 0 {
            let kind = std::any::type_name::<T>();
            tracing::error!(kind, error = %library_error("fi_close", -rc), "a libfabric object leaks");
        }
    }
}

/// A provider's answer to what we asked for.
pub(crate) struct Info {
    info: NonNull<ffi::fi_info>,
}

// SAFETY: never written after it was made.
unsafe impl Send for Info {}
// SAFETY: as above.
unsafe impl Sync for Info {}

impl Info {
    fn new(info: *mut ffi::fi_info, call: &'static str) -> Result<Self, FabricError> {
        NonNull::new(info).map(|info| Self { info }).ok_or_else(|| library_error(call, libc::ENOMEM))
    }

    fn raw(&self) -> *mut ffi::fi_info {
        self.info.as_ptr()
    }

    fn get(&self) -> &ffi::fi_info {
        // SAFETY: libfabric made it, and it lives as long as `self`.
        unsafe { self.info.as_ref() }
    }

    fn domain_attr(&self) -> &ffi::fi_domain_attr {
        // SAFETY: libfabric always fills in this attribute.
        unsafe { &*self.get().domain_attr }
    }

    fn provider_name(&self) -> String {
        // SAFETY: libfabric always fills in this attribute.
        let name = unsafe { (*self.get().fabric_attr).prov_name };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: a NUL-terminated string that lives as long as the information.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// How many operations the provider queues.
    pub(crate) fn transmit_depth(&self) -> usize {
        // SAFETY: libfabric always fills in this attribute.
        unsafe { (*self.get().tx_attr).size }
    }

    /// Local pieces that one operation may have.
    pub(crate) fn pieces_max(&self) -> usize {
        // SAFETY: libfabric always fills in this attribute.
        let limit = unsafe { (*self.get().tx_attr).iov_limit };
        limit.clamp(1, PIECES_MAX)
    }

    /// Whether peers address memory by virtual address rather than by offset.
    pub(crate) fn virtual_addresses(&self) -> bool {
        self.domain_attr().mr_mode & ffi::mr_mode::VIRT_ADDR != 0
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: made by fi_getinfo or fi_dupinfo, freed once.
        unsafe { ffi::fi_freeinfo(self.raw()) };
    }
}

/// Asks libfabric for a provider with one-sided operations at a source address.
pub(crate) fn discover(provider: &str, source: &Source) -> Result<Info, FabricError> {
    let bad_name = |_| FabricError::BadProviderName { name: provider.to_owned() };
    let name = CString::new(provider).map_err(bad_name)?;
    // SAFETY: fi_dupinfo of nothing makes empty hints.
    let hints = Info::new(unsafe { ffi::fi_dupinfo(ptr::null()) }, "fi_dupinfo")?;
    {
        // SAFETY: we own the hints and nobody else knows them yet.
        let root = unsafe { &mut *hints.raw() };
        root.caps =
            ffi::flags::RMA | ffi::flags::READ | ffi::flags::WRITE | ffi::flags::REMOTE_READ | ffi::flags::REMOTE_WRITE;
        root.mode = ffi::flags::CONTEXT | ffi::flags::CONTEXT2;
        // SAFETY: fi_dupinfo allocates every attribute.
        unsafe { (*root.ep_attr).type_ = ffi::FI_EP_RDM };
        // SAFETY: as above.
        let domain = unsafe { &mut *root.domain_attr };
        // FI_MR_ENDPOINT is not offered: closing an endpoint would then wait for its registrations, and that is our fence.
        domain.mr_mode =
            ffi::mr_mode::LOCAL | ffi::mr_mode::VIRT_ADDR | ffi::mr_mode::ALLOCATED | ffi::mr_mode::PROV_KEY;
        domain.threading = ffi::FI_THREAD_SAFE;
        // SAFETY: `name` is NUL-terminated; fi_freeinfo frees the copy.
        let copy = unsafe { libc::strdup(name.as_ptr()) };
        // SAFETY: fi_dupinfo allocates every attribute.
        unsafe { (*root.fabric_attr).prov_name = copy };
    }
    let node = CString::new(source.ip.to_string()).map_err(bad_name)?;
    let service = CString::new(source.port.unwrap_or(0).to_string()).map_err(bad_name)?;
    let service = source.port.map_or(ptr::null(), |_| service.as_ptr());
    let mut found = ptr::null_mut();
    // SAFETY: the strings and hints live across the call.
    let rc = unsafe { ffi::fi_getinfo(API, node.as_ptr(), service, ffi::flags::SOURCE, hints.raw(), &raw mut found) };
    let missing = |found: String| {
        let (major, minor) = version();
        FabricError::NoProvider { asked: provider.to_owned(), found, version: format!("{major}.{minor}") }
    };
    if rc == -libc::ENODATA {
        return Err(missing("none".to_owned()));
    }
    check("fi_getinfo", rc)?;
    let info = Info::new(found, "fi_getinfo")?;
    let name = info.provider_name();
    if name == provider { Ok(info) } else { Err(missing(name)) }
}

/// Major and minor version of the loaded library.
pub(crate) fn version() -> (u32, u32) {
    // SAFETY: no arguments, no state.
    let version = unsafe { ffi::fi_version() };
    (version >> 16, version & 0xffff)
}

/// A fabric and a domain in it: the space in which keys are valid. Field order is closing order.
pub(crate) struct Domain {
    domain: Handle<ffi::fid_domain>,
    fabric: Handle<ffi::fid_fabric>,
    pub(crate) info: Info,
    /// Held in every call that registers memory, ends that, knows or forgets peers, posts, makes progress, or asks whether one may sleep.
    calls: Mutex<()>,
}

impl Domain {
    pub(crate) fn open(info: Info) -> Result<Self, FabricError> {
        let attributes = info.get().fabric_attr;
        let fabric = Handle::open("fi_fabric", |made| {
            // SAFETY: the attributes live as long as `info`.
            unsafe { ffi::fi_fabric(attributes, made, ptr::null_mut()) }
        })?;
        let domain = Handle::open("fi_domain", |made| {
            // SAFETY: fabric and information are open.
            unsafe { ffi::fi_domain(fabric.raw(), info.raw(), made, ptr::null_mut()) }
        })?;
        Ok(Self { domain, fabric, info, calls: Mutex::new(()) })
    }

    /// Registers `length` bytes at `start`, which the caller keeps mapped until the registration *and* every endpoint of this
    /// domain are closed.
    pub(crate) fn register(
        self: &Arc<Self>,
        start: *mut u8,
        length: usize,
        access: u64,
        key: u64,
    ) -> Result<Region, FabricError> {
        let _alone = self.calls.lock();
        let region = Handle::open("fi_mr_reg", |made| {
            // SAFETY: the domain is open; the caller keeps the memory.
            unsafe {
                ffi::fi_mr_reg(
                    self.domain.raw(),
                    start.cast(),
                    length,
                    access,
                    0,
                    key,
                    0,
                    made,
                    ptr::null_mut::<c_void>(),
                )
            }
        })
        .map_err(|error| match error {
            FabricError::Library { errno: ffi::errno::ENOKEY, .. } => FabricError::KeyInUse { key },
            other => other,
        })?;
        // SAFETY: the region is open.
        let key = unsafe { ffi::fi_mr_key(region.raw()) };
        // SAFETY: as above.
        let descriptor = unsafe { ffi::fi_mr_desc(region.raw()) }.expose_provenance();
        Ok(Region { region: Some(region), key, descriptor, domain: Arc::clone(self) })
    }
}

/// A memory region known to a domain.
pub(crate) struct Region {
    /// None only while it is dropped.
    region: Option<Handle<ffi::fid_mr>>,
    key: u64,
    descriptor: usize,
    domain: Arc<Domain>,
}

impl Region {
    /// The key that peers name.
    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// What local operations name, as an address; it means something while the region is open.
    pub(crate) fn descriptor(&self) -> usize {
        self.descriptor
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let _alone = self.domain.calls.lock();
        drop(self.region.take());
    }
}

/// Direction of an operation, seen from us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Write,
    Read,
}

/// Local bytes of an operation.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) start: *mut u8,
    pub(crate) length: usize,
    /// Of the open region that they are in.
    pub(crate) descriptor: usize,
}

/// One operation as libfabric wants it.
pub(crate) struct Order {
    pub(crate) direction: Direction,
    pub(crate) peer: u64,
    pub(crate) remote_address: u64,
    pub(crate) remote_key: u64,
    /// 64 bytes that libfabric may use until the completion, which also names the operation.
    pub(crate) context: *mut c_void,
}

/// A completion: the context of the operation, and how it ended.
pub(crate) struct Completion {
    pub(crate) context: usize,
    pub(crate) outcome: Result<(), Failure>,
}

/// What one look at a queue found: completions of operations that went well, or one of one that failed.
pub(crate) struct Completions {
    entries: std::iter::Take<std::array::IntoIter<ffi::fi_cq_entry, BATCH>>,
    failure: Option<Completion>,
}

impl Iterator for Completions {
    type Item = Completion;

    fn next(&mut self) -> Option<Completion> {
        let entry = self.entries.next().map(|entry| Completion { context: entry.op_context.addr(), outcome: Ok(()) });
        entry.or_else(|| self.failure.take())
    }
}

/// What the provider says of a failed operation.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: i32,
    pub(crate) provider_errno: i32,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn into_error(self) -> OperationError {
        let Self { errno, provider_errno, text } = self;
        OperationError::Failed { errno, provider_errno, text }
    }
}

/// An enabled endpoint with its queue and address vector. Field order is closing order.
pub(crate) struct Wires {
    endpoint: Handle<ffi::fid_ep>,
    after: Queue,
}

/// What is closed after the endpoint.
struct Queue {
    queue: Handle<ffi::fid_cq>,
    addresses: Handle<ffi::fid_av>,
    descriptor: RawFd,
    domain: Arc<Domain>,
}

/// How one waits for a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitObject {
    /// By its descriptor. Also what starts libfabric's own progress thread, where it has one.
    Descriptor,
    /// Not at all: by looking.
    None,
}

impl Wires {
    pub(crate) fn open(domain: Arc<Domain>, source: &Source, wait: WaitObject) -> Result<Self, FabricError> {
        let mut attributes = ffi::fi_av_attr { type_: ffi::FI_AV_TABLE, count: 64, ..Default::default() };
        let addresses = Handle::open("fi_av_open", |made| {
            // SAFETY: the domain is open, the attributes live across the call.
            unsafe { ffi::fi_av_open(domain.domain.raw(), &raw mut attributes, made, ptr::null_mut()) }
        })?;
        let mut attributes = ffi::fi_cq_attr {
            size: QUEUE_ENTRIES,
            format: ffi::FI_CQ_FORMAT_CONTEXT,
            wait_obj: match wait {
                WaitObject::Descriptor => ffi::FI_WAIT_FD,
                WaitObject::None => ffi::FI_WAIT_NONE,
            },
            ..Default::default()
        };
        let queue = Handle::open("fi_cq_open", |made| {
            // SAFETY: the domain is open, the attributes live across the call.
            unsafe { ffi::fi_cq_open(domain.domain.raw(), &raw mut attributes, made, ptr::null_mut()) }
        })?;
        let in_use = |error: FabricError| match error {
            FabricError::Library { errno: libc::EADDRINUSE, .. } => {
                FabricError::AddressInUse { ip: source.ip, port: source.port.unwrap_or(0) }
            }
            other => other,
        };
        let endpoint = Handle::open("fi_endpoint", |made| {
            // SAFETY: domain and information are open.
            unsafe { ffi::fi_endpoint(domain.domain.raw(), domain.info.raw(), made, ptr::null_mut()) }
        })
        .map_err(in_use)?;
        // From here on an early return must close the endpoint before the rest, as dropping `Wires` does.
        let after = Queue { queue, addresses, descriptor: -1, domain };
        let mut wires = Self { endpoint, after };
        // SAFETY: both are open and of one domain.
        let rc = unsafe { ffi::fi_ep_bind(wires.endpoint.raw(), wires.after.addresses.fid(), 0) };
        check("fi_ep_bind (addresses)", rc)?;
        let flags = ffi::flags::TRANSMIT | ffi::flags::RECV;
        // SAFETY: both are open and of one domain.
        let rc = unsafe { ffi::fi_ep_bind(wires.endpoint.raw(), wires.after.queue.fid(), flags) };
        check("fi_ep_bind (queue)", rc)?;
        // SAFETY: the endpoint is open and bound.
        let rc = unsafe { ffi::fi_enable(wires.endpoint.raw()) };
        check("fi_enable", rc).map_err(in_use)?;
        if wait == WaitObject::None {
            return Ok(wires);
        }
        let mut descriptor: RawFd = -1;
        // SAFETY: FI_GETWAIT of a queue with FI_WAIT_FD writes one int.
        let rc = unsafe {
            ffi::fi_control(
                wires.after.queue.fid(),
                i32::try_from(ffi::FI_GETWAIT).expect("a small enumeration"),
                (&raw mut descriptor).cast(),
            )
        };
        check("fi_control(FI_GETWAIT)", rc)?;
        wires.after.descriptor = descriptor;
        Ok(wires)
    }

    /// The descriptor that becomes readable when there is something to do, after a [`may_sleep`](Self::may_sleep).
    pub(crate) fn descriptor(&self) -> RawFd {
        self.after.descriptor
    }

    pub(crate) fn address(&self) -> Result<FabricAddress, FabricError> {
        let mut bytes = [0u8; ADDRESS_BYTES_MAX];
        let mut length = bytes.len();
        // SAFETY: the buffer has `length` bytes.
        let rc = unsafe { ffi::fi_getname(self.endpoint.fid(), bytes.as_mut_ptr().cast(), &raw mut length) };
        check("fi_getname", rc)?;
        FabricAddress::from_bytes(&bytes[..length.min(ADDRESS_BYTES_MAX)])
    }

    /// Makes a peer known; `address` was checked to be of our kind.
    pub(crate) fn insert(&self, address: &FabricAddress) -> Result<u64, FabricError> {
        let mut bytes = [0u8; ADDRESS_BYTES_MAX];
        bytes[..address.as_bytes().len()].copy_from_slice(address.as_bytes());
        let mut peer = ffi::ADDR_UNSPEC;
        let _alone = self.after.domain.calls.lock();
        // SAFETY: `bytes` is longer than any address.
        let inserted = unsafe {
            ffi::fi_av_insert(
                self.after.addresses.raw(),
                bytes.as_ptr().cast(),
                1,
                &raw mut peer,
                0,
                ptr::null_mut::<c_void>(),
            )
        };
        match inserted {
            1 => Ok(peer),
            0 => Err(library_error("fi_av_insert", libc::EINVAL)),
            rc => Err(library_error("fi_av_insert", -rc)),
        }
    }

    pub(crate) fn remove(&self, mut peer: u64) {
        let _alone = self.after.domain.calls.lock();
        // SAFETY: the address vector is open and knows this peer.
        let rc = unsafe { ffi::fi_av_remove(self.after.addresses.raw(), &raw mut peer, 1, 0) };
        if rc != 0 {
            tracing::debug!(error = %library_error("fi_av_remove", -rc), "a peer stays in the address vector");
        }
    }

    /// Hands an operation to the provider, with as many local pieces as it takes; 0, or a negative error number (then nothing was
    /// begun).
    ///
    /// The caller keeps the local memory, its regions and the context until the completion, or until the endpoint is closed.
    pub(crate) fn post(&self, order: &Order, pieces: impl Iterator<Item = Piece>) -> i32 {
        let mut local = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
        let mut descriptors = [ptr::null_mut::<c_void>(); PIECES_MAX];
        let (mut count, mut length) = (0, 0);
        for (piece, (local, descriptor)) in pieces.zip(local.iter_mut().zip(&mut descriptors)) {
            *local = libc::iovec { iov_base: piece.start.cast(), iov_len: piece.length };
            *descriptor = ptr::with_exposed_provenance_mut(piece.descriptor);
            count += 1;
            length += piece.length;
        }
        let remote = ffi::fi_rma_iov { addr: order.remote_address, len: length, key: order.remote_key };
        let message = ffi::fi_msg_rma {
            msg_iov: local.as_ptr(),
            desc: descriptors.as_mut_ptr(),
            iov_count: count,
            addr: order.peer,
            rma_iov: &raw const remote,
            rma_iov_count: 1,
            context: order.context,
            data: 0,
        };
        let _alone = self.after.domain.calls.lock();
        let rc = match order.direction {
            Direction::Write => {
                let flags = ffi::flags::COMPLETION | ffi::flags::DELIVERY_COMPLETE;
                // SAFETY: the message lives across the call; what it points to is kept by the caller.
                unsafe { ffi::fi_writemsg(self.endpoint.raw(), &raw const message, flags) }
            }
            // SAFETY: as above.
            Direction::Read => unsafe {
                ffi::fi_readmsg(self.endpoint.raw(), &raw const message, ffi::flags::COMPLETION)
            },
        };
        i32::try_from(rc).unwrap_or(-libc::EIO)
    }

    /// Drives the provider and takes a batch of completions.
    pub(crate) fn progress(&self) -> Completions {
        self.after.progress()
    }

    /// Whether one may wait for the descriptor; if not, there is something to do already.
    pub(crate) fn may_sleep(&self) -> bool {
        let mut fid = self.after.queue.fid();
        let _alone = self.after.domain.calls.lock();
        // SAFETY: fabric and queue are open.
        unsafe { ffi::fi_trywait(self.after.domain.fabric.raw(), &raw mut fid, 1) == 0 }
    }

    /// Closes the endpoint, and with it every connection; then takes the completions that were on their way, and closes the
    /// rest. On an error the endpoint is still open.
    pub(crate) fn close(self, late: &mut Vec<Completion>) -> Result<(), FabricError> {
        let Self { endpoint, after } = self;
        {
            let _alone = after.domain.calls.lock();
            check("fi_close (endpoint)", endpoint.close())?;
        }
        loop {
            let before = late.len();
            late.extend(after.progress());
            if late.len() == before {
                break;
            }
        }
        Ok(())
    }
}

impl Queue {
    fn progress(&self) -> Completions {
        let mut entries = [ffi::fi_cq_entry::default(); BATCH];
        let _alone = self.domain.calls.lock();
        // SAFETY: there is room for BATCH entries of the format that the queue was opened with.
        let read = unsafe { ffi::fi_cq_read(self.queue.raw(), entries.as_mut_ptr().cast(), BATCH) };
        let failed = read == -isize::try_from(ffi::errno::EAVAIL).expect("a small number");
        let failure = if failed { self.read_failure() } else { None };
        Completions { entries: entries.into_iter().take(usize::try_from(read).unwrap_or(0)), failure }
    }

    fn read_failure(&self) -> Option<Completion> {
        let mut entry = ffi::fi_cq_err_entry::default();
        // SAFETY: `entry` is zeroed: it asks for no provider data.
        let read = unsafe { ffi::fi_cq_readerr(self.queue.raw(), &raw mut entry, 0) };
        if read != 1 {
            return None;
        }
        let mut detail = [0; 128];
        // SAFETY: the buffer is `detail.len()` bytes; the error data is valid until the queue is read again.
        let text = unsafe {
            ffi::fi_cq_strerror(self.queue.raw(), entry.prov_errno, entry.err_data, detail.as_mut_ptr(), detail.len())
        };
        let detail = if text.is_null() {
            String::new()
        } else {
            // SAFETY: a NUL-terminated string, static or in `detail`.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let failure = Failure {
            errno: entry.err,
            provider_errno: entry.prov_errno,
            text: format!("{} ({}; {detail})", strerror(entry.err), errno_name(entry.err)),
        };
        Some(Completion { context: entry.op_context.addr(), outcome: Err(failure) })
    }
}

fn check(call: &'static str, rc: i32) -> Result<(), FabricError> {
    if rc == 0 { Ok(()) } else { Err(library_error(call, -rc)) }
}

/// The error of a call that gave `errno` (positive).
pub(crate) fn library_error(call: &'static str, errno: i32) -> FabricError {
    FabricError::Library { call, errno, name: errno_name(errno), text: strerror(errno), hint: errno_hint(errno) }
}

/// libfabric's own words for an error number.
pub(crate) fn strerror(errno: i32) -> String {
    // SAFETY: gives a static string for every number.
    let text = unsafe { ffi::fi_strerror(errno) };
    // SAFETY: NUL-terminated and static.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
