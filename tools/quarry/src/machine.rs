//! What the kernel says of this machine.

use std::fs;

/// The congestion control that new TCP connections have, if the kernel tells.
#[must_use]
pub fn congestion_control() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").ok()?;
    Some(text.trim().to_owned()).filter(|name| !name.is_empty())
}
