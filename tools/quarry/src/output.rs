//! What commands print: tables for people, JSON for programs.

use comfy_table::{Table, presets};

/// A table with a header, without lines between rows.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header.to_vec());
    table
}
