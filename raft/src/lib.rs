//! Many Raft groups on one sled log: consensus behind a few traits.
