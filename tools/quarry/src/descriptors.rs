//! File descriptors: a daemon takes as many as the system lets it have, and lets in no more clients than it has descriptors for.

use quarry_trust::Limits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{info, warn};

/// Descriptors that are not for clients: files, lanes of writers (7 for each of 256), nodes, administrators, handshakes, metrics.
const KEPT: u64 = 4096;

/// Raises the number of descriptors that this process may have open to the most that it may set, and cuts the limits to it.
pub(crate) fn fit(limits: &mut Limits) {
    let found = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: found.maximum, ..found };
    let current = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => found.maximum,
        Err(error) => {
            warn!(%error, "the number of open files stays as it was");
            found.current
        }
    };
    let Some(files) = current else { return };
    let fitting = connections(files);
    if fitting >= limits.connections_max {
        info!(files, connections_max = limits.connections_max, "connections of clients");
        return;
    }
    warn!(
        files,
        wanted = limits.connections_max,
        connections_max = fitting,
        "fewer connections of clients than configured: raise the limit of open files (LimitNOFILE, ulimit -n)"
    );
    limits.connections_max = fitting;
    limits.connections_per_client_max = limits.connections_per_client_max.min(fitting);
}

/// Connections of clients for which there are descriptors: what is not kept, and a quarter of few.
fn connections(files: u64) -> usize {
    let spare = files.saturating_sub(KEPT).max(files / 4).max(1);
    usize::try_from(spare).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_have_what_is_not_kept_and_a_quarter_where_that_is_nothing() {
        assert_eq!(connections(65_536), 61_440);
        assert_eq!(connections(4096), 1024);
        assert_eq!(connections(1024), 256);
        assert_eq!(connections(0), 1);
    }
}
