//! Parses Kubernetes quantities: `1Gi`, `512M`, `1.5e9`.

use serde_json::Value;

/// Returns the bytes of a memory quantity, or `None` if it is invalid or absent.
pub(super) fn bytes(quantity: &Value) -> Option<u64> {
    let bytes = match quantity {
        Value::String(text) => scan(text)?,
        // A number without quotes in YAML.
        Value::Number(number) => number.as_f64()?,
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => return None,
    };
    // Up to 9e15, an `f64` represents every whole number exactly.
    (1.0..9e15).contains(&bytes).then_some(bytes as u64)
}

fn scan(text: &str) -> Option<f64> {
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let factor = match suffix {
        "" => 1.0,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => 1024_f64.powi(1),
        "Mi" => 1024_f64.powi(2),
        "Gi" => 1024_f64.powi(3),
        "Ti" => 1024_f64.powi(4),
        exponent => 10_f64.powi(exponent.strip_prefix(['e', 'E'])?.parse().ok()?),
    };
    Some(number.parse::<f64>().ok()? * factor)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quantities_are_parsed_as_in_kubernetes() {
        let known = [
            (json!("1073741824"), 1 << 30),
            (json!("1Gi"), 1 << 30),
            (json!("1.5Gi"), 3 << 29),
            (json!(".5Mi"), 1 << 19),
            (json!("64Ki"), 1 << 16),
            (json!("2Ti"), 2 << 40),
            (json!("512M"), 512_000_000),
            (json!("3k"), 3_000),
            (json!("1e9"), 1_000_000_000),
            (json!("15E2"), 1_500),
            (json!("128974848000m"), 128_974_848),
            (json!(1_048_576), 1 << 20),
        ];
        for (quantity, bytes) in known {
            assert_eq!(super::bytes(&quantity), Some(bytes), "{quantity}");
        }
    }

    #[test]
    fn invalid_memory_quantity_is_none() {
        for text in ["", "Gi", "1GB", "1 Gi", "-1Gi", "1..5Gi", "0", "inf", "NaN", "1e", "1e999", "1m", "1e400Mi"] {
            assert_eq!(bytes(&json!(text)), None, "{text:?}");
        }
        for other in [json!(null), json!(-5), json!(true), json!({"memory": "1Gi"})] {
            assert_eq!(bytes(&other), None, "{other}");
        }
    }
}
