//! The gRPC services of Quarry and the version check of each call.
