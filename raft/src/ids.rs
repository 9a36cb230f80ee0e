//! The names of this crate: groups, nodes, places in a log.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// One Raft group: a log and a machine of its own. Group 0 is the directory, 1 and up are shards.
    GroupId(u32)
}
number! {
    /// One member of Raft groups. A number names one node, with one log, for ever: it is never given to another.
    RaftNodeId(u64)
}
number! {
    /// A place in a group's log. The entry that forms a group has index 0 and is no command of a machine, so
    /// index 0 also stands for "nothing applied yet".
    LogIndex(u64)
}
number! {
    /// A period with at most one leader. Grows for ever.
    Term(u64)
}
