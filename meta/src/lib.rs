//! The meta node: serves the directory and the shards.
