//! Generates the bindings from the headers that are installed, and compiles libfabric's static inline functions
//! (`fi_writemsg`, `fi_cq_read`, ...) into real symbols, since nothing else exports them.

use std::{env, path::PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=wrapper.h");

    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR for build scripts"));
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR for build scripts");
    let library = pkg_config::Config::new().atleast_version("1.17").probe("libfabric").unwrap_or_else(|error| {
        panic!("libfabric 1.17 or newer with its headers is needed (Debian: apt install libfabric-dev): {error}")
    });

    let wrappers = out.join("static_functions.c");
    let mut builder = bindgen::Builder::default()
        .header("wrapper.h")
        .allowlist_function("fi_.*")
        .allowlist_type("fi_.*")
        .allowlist_var("FI_.*")
        .blocklist_type("iovec|pollfd|timespec")
        .raw_line("use libc::{iovec, pollfd};")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .wrap_static_fns(true)
        .wrap_static_fns_path(&wrappers)
        .parse_callbacks(Box::new(bindgen::CargoCallbacks::new()))
        .formatter(bindgen::Formatter::None);
    let mut compiler = cc::Build::new();
    compiler.file(&wrappers).include(&root).opt_level(2).warnings(false);
    for path in &library.include_paths {
        builder = builder.clang_arg(format!("-I{}", path.display()));
        compiler.include(path);
    }
    builder
        .generate()
        .unwrap_or_else(|error| panic!("bindgen failed (it needs libclang; Debian: apt install libclang-dev): {error}"))
        .write_to_file(out.join("bindings.rs"))
        .expect("OUT_DIR is writable");
    compiler.compile("fabric_static_functions");
    // Once more, behind the archive that uses it: linkers read from left to right.
    println!("cargo:rustc-link-lib=fabric");
}
