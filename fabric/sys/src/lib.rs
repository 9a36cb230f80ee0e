//! Bindings to the installed libfabric (1.17 or newer), made by bindgen at build time.
//!
//! Decides nothing: names and types are those of libfabric, see its man pages. Two things are written by hand, because the
//! headers hold them in a form that bindgen cannot read or gives an unhandy type: [`ADDR_UNSPEC`] and the bit [`flags`].
//! Use `quarry-fabric`, the safe layer, rather than this.

#![allow(
    non_upper_case_globals,
    non_camel_case_types,
    non_snake_case,
    unnecessary_transmutes,
    unsafe_op_in_unsafe_fn,
    clippy::all
)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));

/// `FI_ADDR_UNSPEC`: no address.
pub const ADDR_UNSPEC: u64 = u64::MAX;

/// The bit flags that we use, all as the `uint64_t` that libfabric's calls take.
pub mod flags {
    pub const RMA: u64 = super::FI_RMA as u64;
    pub const READ: u64 = super::FI_READ as u64;
    pub const WRITE: u64 = super::FI_WRITE as u64;
    pub const REMOTE_READ: u64 = super::FI_REMOTE_READ as u64;
    pub const REMOTE_WRITE: u64 = super::FI_REMOTE_WRITE as u64;
    pub const TRANSMIT: u64 = super::FI_TRANSMIT as u64;
    pub const RECV: u64 = super::FI_RECV as u64;
    pub const SOURCE: u64 = super::FI_SOURCE as u64;
    pub const COMPLETION: u64 = super::FI_COMPLETION as u64;
    pub const DELIVERY_COMPLETE: u64 = super::FI_DELIVERY_COMPLETE as u64;
    pub const CONTEXT: u64 = super::FI_CONTEXT as u64;
    pub const CONTEXT2: u64 = super::FI_CONTEXT2 as u64;
}

/// The bits of `mr_mode`, as the `int` that it is.
pub mod mr_mode {
    pub const LOCAL: i32 = super::FI_MR_LOCAL as i32;
    pub const VIRT_ADDR: i32 = super::FI_MR_VIRT_ADDR as i32;
    pub const ALLOCATED: i32 = super::FI_MR_ALLOCATED as i32;
    pub const PROV_KEY: i32 = super::FI_MR_PROV_KEY as i32;
}

/// Error numbers as positive `int`s (libfabric returns them negated).
pub mod errno {
    pub const EAVAIL: i32 = super::FI_EAVAIL as i32;
    pub const ENOKEY: i32 = super::FI_ENOKEY as i32;
}
