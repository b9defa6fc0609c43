//! Settings of the export of metrics: OpenTelemetry's environment variables, next to those of traces.

use std::time::Duration;

use http::{HeaderName, HeaderValue, Uri};

use crate::settings::{SettingError, Source, Target};

const EXPORTER: &str = "OTEL_METRICS_EXPORTER";
const INTERVAL: &str = "OTEL_METRIC_EXPORT_INTERVAL";

/// OpenTelemetry's own default.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(60);

/// The collector that receives the metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsTarget {
    pub(super) target: Target,
    pub(super) interval: Duration,
    /// Their values are marked as sensitive, so that they are never shown.
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    /// True if bodies are compressed with gzip.
    pub(super) is_packed: bool,
}

impl MetricsTarget {
    /// Returns the target, given the base address and the setting it came from, if any. `None` (the default) disables
    /// the export: it requires `OTEL_METRICS_EXPORTER=otlp`.
    pub fn resolve(base: Option<(&str, &str)>) -> Result<Option<Self>, SettingError> {
        Self::resolve_with(base, &Source(&|name| std::env::var(name).ok()))
    }

    fn resolve_with(base: Option<(&str, &str)>, source: &Source<'_>) -> Result<Option<Self>, SettingError> {
        // The variable may list several exporters; the others are not this program's.
        let exporters = source.variable(EXPORTER).unwrap_or_default();
        if !exporters.split(',').any(|exporter| exporter.trim() == "otlp") || source.is_disabled() {
            return Ok(None);
        }
        let Some(target) = Target::of_signal("METRICS", base, source)? else {
            let how = "otlp requires a collector: set OTEL_EXPORTER_OTLP_ENDPOINT, such as http://collector:4318";
            return Err(SettingError::new(EXPORTER, how));
        };
        let headers = source.either("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS");
        let packing = source.either("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION");
        Ok(Some(Self {
            target,
            interval: interval(source)?,
            headers: headers.iter().flat_map(|list| list.split(',')).filter_map(header).collect(),
            is_packed: packing.is_some_and(|name| name == "gzip"),
        }))
    }

    pub(super) fn uri(&self) -> Result<Uri, SettingError> {
        let uri = self.target.url.as_str().parse::<Uri>();
        uri.map_err(|error| SettingError::new("OTEL_EXPORTER_OTLP_*", error.to_string()))
    }
}

fn interval(source: &Source<'_>) -> Result<Duration, SettingError> {
    let Some(text) = source.variable(INTERVAL) else { return Ok(DEFAULT_INTERVAL) };
    let millis = text.parse::<u64>().ok().filter(|millis| *millis > 0);
    millis.map(Duration::from_millis).ok_or_else(|| {
        let shown: String = text.chars().filter(|char| !char.is_control()).take(32).collect();
        SettingError::new(INTERVAL, format!("{shown:?} is not allowed: milliseconds, at least 1"))
    })
}

/// Parses `NAME=VALUE`, whose value may contain `%20` and the like. Malformed ones are ignored, as for traces.
fn header(pair: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = pair.split_once('=')?;
    let mut value = HeaderValue::from_bytes(&decoded(value.trim())?).ok()?;
    value.set_sensitive(true);
    Some((name.trim().parse().ok()?, value))
}

/// Decodes the percent-encoding.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte == b'%' {
            let (digits, after) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = after;
        } else {
            bytes.push(byte);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Option<(&str, &str)> = Some(("--otlp-endpoint", "http://c:4318"));
    const ON: (&str, &str) = (EXPORTER, "otlp");

    fn resolve(base: Option<(&str, &str)>, variables: &[(&str, &str)]) -> Result<Option<MetricsTarget>, SettingError> {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, it)| (*it).to_owned());
        MetricsTarget::resolve_with(base, &Source(&value))
    }

    fn target(variables: &[(&str, &str)]) -> MetricsTarget {
        resolve(BASE, variables).expect("settings").expect("a target")
    }

    #[test]
    fn export_is_off_without_opt_in() {
        for variables in
            [&[][..], &[(EXPORTER, "none")], &[(EXPORTER, "prometheus")], &[ON, ("OTEL_SDK_DISABLED", "true")]]
        {
            assert_eq!(resolve(BASE, variables), Ok(None), "{variables:?}");
        }
        assert!(resolve(BASE, &[(EXPORTER, "prometheus, otlp")]).expect("settings").is_some());
    }

    #[test]
    fn opt_in_without_endpoint_is_error() {
        let error = resolve(None, &[ON]).expect_err("no endpoint").to_string();
        assert!(error.starts_with(EXPORTER) && error.contains("OTEL_EXPORTER_OTLP_ENDPOINT"), "{error}");
    }

    #[test]
    fn metrics_have_path_interval_and_timeout_of_their_own() {
        let plain = target(&[ON]);
        assert_eq!((plain.target.url.as_str(), plain.interval), ("http://c:4318/v1/metrics", Duration::from_secs(60)));
        let own = target(&[
            ON,
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://m/x"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "250"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "5"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "7"),
        ]);
        assert_eq!((own.target.url.as_str(), own.interval), ("http://m/x", Duration::from_millis(250)));
        assert_eq!(own.target.timeout, Duration::from_millis(7));
        for wrong in ["0", "-1", "soon"] {
            let error = resolve(BASE, &[ON, (INTERVAL, wrong)]).expect_err(wrong).to_string();
            assert!(error.starts_with(INTERVAL) && error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn headers_are_decoded_and_never_shown() {
        let headers =
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20planted+/=, x-a = b,nonsense,x-b=%zz,x-c=%4");
        let target = target(&[ON, headers, ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")]);
        let shown: Vec<_> = target.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(shown, [("authorization", &b"Bearer planted+/="[..]), ("x-a", &b"b"[..])]);
        assert!(target.is_packed && !format!("{target:?}").contains("planted"), "{target:?}");
        let own = ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "x-own=1");
        assert_eq!(
            resolve(BASE, &[ON, headers, own]).expect("settings").expect("a target").headers.len(),
            1,
            "its own headers replace the common ones"
        );
    }
}
