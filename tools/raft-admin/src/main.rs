//! Administer a Quarry meta cluster.
fn main() {}
