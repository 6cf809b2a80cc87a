//! Sizes as people write and read them: `512M`, `1.5GiB`, "1.2 GiB". Units are powers of 1024.

use std::fmt;

/// Units from the smallest; each is 1024 of the one before.
const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SizeError {
    /// It does not start with a number.
    NoNumber(String),
    /// What follows the number is no unit.
    UnknownUnit(String),
    /// It is a fraction of a byte.
    FractionOfByte(String),
    /// It is more than 64 bits can count.
    TooLarge(String),
    /// It is a share, where only a number of bytes will do.
    Percent(String),
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNumber(text) => {
                write!(f, "`{}` is no size: write a number and a unit, such as 512M or 1.5GiB", text.escape_debug())
            }
            Self::UnknownUnit(unit) => {
                write!(f, "`{}` is no unit of size: use K, M, G or T, or none for bytes", unit.escape_debug())
            }
            Self::FractionOfByte(text) => write!(f, "`{text}` is a fraction of a byte: add a unit, such as `{text}G`"),
            Self::TooLarge(text) => write!(f, "`{}` is more than 2^64 bytes: check its unit", text.escape_debug()),
            Self::Percent(text) => {
                write!(f, "`{}` is a share: a number of bytes is needed here, such as 512M", text.escape_debug())
            }
        }
    }
}

impl std::error::Error for SizeError {}

/// Reads a number of bytes: digits, perhaps with decimals, and perhaps a unit (`K`, `M`, `G`, `T`, each also with `B`
/// or `iB`, in any case), all powers of 1024. Parts of a byte are dropped.
///
/// # Errors
/// When `text` is no such number, or more than 64 bits can count. Shares (`50%`) are an error of their own.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, unit) = (&text[..digits], text[digits..].trim_start());
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    let has_point = whole.len() < number.len();
    if whole.is_empty() || (has_point && decimals.is_empty()) || decimals.contains('.') {
        return Err(SizeError::NoNumber(text.into()));
    }
    if unit == "%" {
        return Err(SizeError::Percent(text.into()));
    }
    let shift = unit_shift(unit).ok_or_else(|| SizeError::UnknownUnit(unit.into()))?;
    if has_point && shift == 0 {
        return Err(SizeError::FractionOfByte(number.into()));
    }
    let too_large = || SizeError::TooLarge(text.into());
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let whole = whole.checked_mul(1 << shift).ok_or_else(too_large)?;
    whole.checked_add(fraction_bytes(decimals, shift)).ok_or_else(too_large)
}

/// The power of two of a unit.
fn unit_shift(unit: &str) -> Option<u32> {
    match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kb" | "kib" => Some(10),
        "m" | "mb" | "mib" => Some(20),
        "g" | "gb" | "gib" => Some(30),
        "t" | "tb" | "tib" => Some(40),
        _ => None,
    }
}

/// `0.decimals` of a unit, rounded down; exact in integers, as a unit is at most 2^40 and 18 digits fit beside it.
fn fraction_bytes(decimals: &str, shift: u32) -> u64 {
    let digits = decimals.bytes().take(18);
    let (numerator, denominator) =
        digits.fold((0_u128, 1_u128), |(n, d), digit| (n * 10 + u128::from(digit - b'0'), d * 10));
    u64::try_from((numerator << shift) / denominator).expect("less than one unit")
}

/// Bytes for people: one decimal of the largest unit that gives at least one, such as "1.2 GiB".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(
    /// The number of bytes.
    pub u64,
);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        // Rounding may reach the next unit: 1023.96 KiB reads 1.0 MiB.
        let (mut unit, mut tenths) = (0, u128::from(self.0) * 10);
        while tenths >= 10240 {
            unit += 1;
            tenths = rounded_tenths(self.0, unit);
        }
        f.pad(&format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit]))
    }
}

/// Tenths of the unit that is `1024^unit` bytes.
fn rounded_tenths(bytes: u64, unit: usize) -> u128 {
    let unit_bytes = 1_u128 << (10 * unit);
    (u128::from(bytes) * 10 + unit_bytes / 2) / unit_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let sizes = [
            ("0", 0),
            ("4096", 4096),
            ("512M", 512 << 20),
            ("4G", 4 << 30),
            ("1.5GiB", 3 << 29),
            ("1.5 gib", 3 << 29),
            ("8kb", 8192),
            ("8 B", 8),
            ("2T", 2 << 40),
            ("0.1K", 102),
            (" 7M ", 7 << 20),
            ("1.000000000000000000000001G", 1 << 30),
            ("18446744073709551615", u64::MAX),
            ("16777215T", 16_777_215 << 40),
        ];
        for (text, bytes) in sizes {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_told_apart() {
        for text in ["", "G", ".5G", "1.G", "1.2.3G", "-1", "+1", "x", "1e9x", ".", "%", "٣"] {
            let error = parse_bytes(text).unwrap_err();
            assert!(matches!(error, SizeError::NoNumber(_) | SizeError::UnknownUnit(_)), "{text}: {error:?}");
        }
        assert_eq!(parse_bytes("5 apples"), Err(SizeError::UnknownUnit("apples".into())));
        assert_eq!(parse_bytes("50%"), Err(SizeError::Percent("50%".into())));
        assert_eq!(parse_bytes("1.5"), Err(SizeError::FractionOfByte("1.5".into())));
        for text in ["18446744073709551616", "16777216T", "99999999999999999999999G"] {
            assert!(matches!(parse_bytes(text), Err(SizeError::TooLarge(_))), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown() {
        let shown = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (1_288_490_189, "1.2 GiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (bytes, text) in shown {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>10}", Bytes(1024)), "   1.0 KiB");
    }
}
