//! Bindings to the installed libfabric, made by bindgen.
