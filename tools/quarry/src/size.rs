//! Numbers of bytes as people write them: 4096, 64KiB, 1.5GiB is not one.

/// Reads a whole number of bytes with an optional unit of KiB, MiB or GiB.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("expected a number of bytes such as 4096, 64KiB, 16MiB or 1GiB, found {text:?}");
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_numbers_with_binary_units() {
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("64KiB"), Ok(65536));
        assert_eq!(parse("16GiB"), Ok(16 << 30));
        for wrong in ["", "KiB", "64KB", "1.5GiB", "-1", "99999999999GiB", "1 MiB"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
