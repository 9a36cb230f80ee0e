//! Every limit that two processes must agree on, in one place, with the relations between them stated to the compiler.

use std::time::Duration;

/// Longest key, in bytes. The shortest is 1.
pub const KEY_BYTES_MAX: usize = 512;
/// Size of the unit in which frames are laid out: slot sizes and header lengths are multiples of it.
pub const FRAME_ALIGN: usize = 64;
/// Memory that the directory lends at a time, in bytes; a region smaller than [`REGION_BYTES_FULL`] is cut in [`EXTENTS_PER_SMALL_REGION`].
pub const EXTENT_BYTES: u64 = 64 << 20;
/// From this size on a region is cut into extents of [`EXTENT_BYTES`].
pub const REGION_BYTES_FULL: u64 = 1 << 30;
/// A small region is cut into this many extents.
pub const EXTENTS_PER_SMALL_REGION: u64 = 16;
/// Largest region, in bytes.
pub const REGION_BYTES_MAX: u64 = 16 << 30;
/// Smallest region, in bytes: each of its extents must hold a slot with the longest key.
pub const REGION_BYTES_MIN: u64 = 1 << 20;
/// Most copies of a value.
pub const COPIES_MAX: usize = 3;
/// Most slots in one slab.
pub const SLOTS_PER_SLAB_MAX: u32 = 4096;
/// Most entries in one commit batch: it is one signature per holder.
pub const COMMIT_ENTRIES_MAX: usize = 4096;
/// Most publishes in one call.
pub const PUBLISHES_TOGETHER_MAX: usize = 64;
/// Most batches that are signed again in one call: they are one command.
pub const RESIGNED_PER_CALL_MAX: usize = 200;
/// Most keys in one resolve, delete or existence call.
pub const KEYS_PER_CALL_MAX: usize = 4096;
/// Largest Raft command, in bytes: larger values would leave the pages that sled keeps in its synced file.
pub const COMMAND_BYTES_MAX: usize = 32 << 10;
/// Largest gRPC message that any server accepts, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// A grant lives at most this long; it cannot be renewed.
pub const GRANT_TTL_MAX: Duration = Duration::from_secs(30);
/// A writer's lane takes new slabs for this long.
pub const LANE_OPEN_TO_NEW: Duration = Duration::from_secs(5);
/// A lane is closed at this age even if a claim on it seems open.
pub const LANE_LIFE_MAX: Duration = Duration::from_secs(40);
/// Writers have lanes of their own up to this many per data node; beyond it they share.
pub const LANES_MAX: usize = 256;
/// Rest of freed memory after its last possible lease.
pub const QUARANTINE: Duration = Duration::from_secs(2);
/// Outcomes are remembered this long (in log time) after their grant closed.
pub const OUTCOME_KEPT: Duration = Duration::from_secs(120);
/// The shard leader keeps the lease horizon about this far ahead of log time.
pub const HORIZON_AHEAD: Duration = Duration::from_secs(10);
/// Longest lease that a resolve gives.
pub const LEASE_MAX: Duration = Duration::from_secs(5);
/// Longest time that a pin lasts without being renewed.
pub const PIN_MAX: Duration = Duration::from_secs(600);
/// Most values under one pin.
pub const KEYS_PER_PIN_MAX: usize = 512;
/// Bytes of keys under one pin at most: a pin is one Raft command.
pub const PIN_KEY_BYTES_MAX: usize = COMMAND_BYTES_MAX / 2;
/// Most pins that one client holds in one shard.
pub const PINS_PER_OWNER_MAX: usize = 128;
/// Most pins in one shard.
pub const PINS_PER_SHARD_MAX: usize = 2048;
/// Versions further than this ahead of a leader's wall clock are turned away at the door.
pub const VERSION_AHEAD_MAX: Duration = Duration::from_secs(600);
/// A region's fabric address, in bytes.
pub const FABRIC_ADDRESS_BYTES_MAX: usize = 64;
/// Longest name of a libfabric provider, in bytes.
pub const PROVIDER_NAME_BYTES_MAX: usize = 16;
/// Longest label of a data node, in bytes.
pub const LABEL_BYTES_MAX: usize = 64;
/// Longest namespace name, in bytes.
pub const NAMESPACE_NAME_BYTES_MAX: usize = 64;
/// Protocol versions that this build speaks, from and including.
pub const PROTOCOL_MIN: u32 = 1;
/// Protocol versions that this build speaks, up to and including.
pub const PROTOCOL_MAX: u32 = 1;

// A lane must outlive the longest grant armed on it, or a healthy writer would be cut off.
const _: () = assert!(LANE_LIFE_MAX.as_secs() >= LANE_OPEN_TO_NEW.as_secs() + GRANT_TTL_MAX.as_secs());
// An outcome must outlive the grant, or a commit retried within the TTL could be told that it is unknown.
const _: () = assert!(OUTCOME_KEPT.as_secs() > GRANT_TTL_MAX.as_secs());
// A leader can always give the longest lease from a horizon that is half used up.
const _: () = assert!(HORIZON_AHEAD.as_secs() >= 2 * LEASE_MAX.as_secs());
// A pin's keys, each with its length, fit in one command beside the rest of it.
const _: () =
    assert!(PIN_KEY_BYTES_MAX + KEYS_PER_PIN_MAX * 4 + 256 <= COMMAND_BYTES_MAX && PIN_KEY_BYTES_MAX >= KEY_BYTES_MAX);
// Who holds pins leaves room for others.
const _: () = assert!(PINS_PER_OWNER_MAX < PINS_PER_SHARD_MAX);
// The smallest extent holds the longest header and something to carry.
const _: () =
    assert!(REGION_BYTES_MIN / EXTENTS_PER_SMALL_REGION >= 2 * (KEY_BYTES_MAX as u64 + 2 * FRAME_ALIGN as u64));
const _: () = assert!(REGION_BYTES_MAX.is_multiple_of(EXTENT_BYTES));

/// Size of an extent of a region of `region_bytes`.
#[must_use]
pub const fn extent_bytes(region_bytes: u64) -> u64 {
    if region_bytes >= REGION_BYTES_FULL { EXTENT_BYTES } else { region_bytes / EXTENTS_PER_SMALL_REGION }
}
