//! Settings of the export: our own setting, and OpenTelemetry's environment variables.

use std::fmt;
use std::time::Duration;

use url::Url;

/// OpenTelemetry's own default.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// The name of our setting in errors, as flag and variable.
pub const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT (--otlp-endpoint)";

/// The collector that receives one signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub(crate) url: Url,
    pub(crate) timeout: Duration,
    pub(crate) ca_file: Option<String>,
}

/// An invalid setting. Its message is one line that never repeats the value, because an address may contain a password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingError {
    setting: String,
    problem: String,
}

impl SettingError {
    pub(crate) fn new(setting: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { setting: setting.into(), problem: problem.into() }
    }

    /// The setting's name.
    pub fn setting(&self) -> &str {
        &self.setting
    }

    /// The problem, and the allowed values.
    pub fn problem(&self) -> &str {
        &self.problem
    }
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.setting, self.problem)
    }
}

impl std::error::Error for SettingError {}

impl Target {
    /// Returns the target, given the base address and the setting it came from, if any. `None` (the default) disables
    /// the export.
    pub fn resolve(base: Option<(&str, &str)>) -> Result<Option<Self>, SettingError> {
        Self::resolve_with(base, &Source(&|name| std::env::var(name).ok()))
    }

    fn resolve_with(base: Option<(&str, &str)>, source: &Source<'_>) -> Result<Option<Self>, SettingError> {
        let is_off = source.is_disabled() || source.variable("OTEL_TRACES_EXPORTER").is_some_and(|text| text == "none");
        if is_off { Ok(None) } else { Self::of_signal("TRACES", base, source) }
    }

    /// Returns the target of `TRACES` or `METRICS`, whose own variables take precedence; `None` without an address.
    pub(crate) fn of_signal(
        signal: &str,
        base: Option<(&str, &str)>,
        source: &Source<'_>,
    ) -> Result<Option<Self>, SettingError> {
        let own = |name: &str| format!("OTEL_EXPORTER_OTLP_{signal}_{name}");
        // The path that the signal adds to a collector's base address.
        let path = format!("/v1/{}", signal.to_ascii_lowercase());
        let base = base.map(|(setting, base)| (setting, base.trim())).filter(|(_, base)| !base.is_empty());
        let url = match (source.variable(&own("ENDPOINT")), base) {
            (Some(whole), _) => address(&own("ENDPOINT"), &whole, &path, false)?,
            (None, Some((setting, base))) => address(setting, base, &path, true)?,
            (None, None) => return Ok(None),
        };
        let millis = source.either(&own("TIMEOUT"), "OTEL_EXPORTER_OTLP_TIMEOUT");
        let timeout = millis.and_then(|text| text.parse().ok()).map_or(DEFAULT_TIMEOUT, Duration::from_millis);
        let ca_file = source.either(&own("CERTIFICATE"), "OTEL_EXPORTER_OTLP_CERTIFICATE");
        Ok(Some(Self { url, timeout, ca_file }))
    }

    /// The collector's address for log lines.
    pub(crate) fn shown(&self) -> String {
        self.url.origin().ascii_serialization()
    }
}

/// The environment variables.
pub(crate) struct Source<'a>(pub(crate) &'a dyn Fn(&str) -> Option<String>);

impl Source<'_> {
    /// Returns a variable. An empty one is treated as unset: the specification, Compose files and charts agree on that.
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// Returns the variable of one signal, or else that of all.
    pub(crate) fn either(&self, of_signal: &str, of_all: &str) -> Option<String> {
        self.variable(of_signal).or_else(|| self.variable(of_all))
    }

    /// True if all exports are disabled.
    pub(crate) fn is_disabled(&self) -> bool {
        self.variable("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"))
    }
}

/// Parses an address; adds the path to a base address.
fn address(setting: &str, text: &str, path: &str, is_base: bool) -> Result<Url, SettingError> {
    let allowed = || {
        let example = format!("http://collector:4318{}", if is_base { "" } else { path });
        let how = "its value (not shown) is not allowed: the URL of a collector that accepts OTLP over HTTP, such as";
        SettingError::new(setting, format!("{how} {example}; put a password into OTEL_EXPORTER_OTLP_HEADERS"))
    };
    let mut url = Url::parse(text).map_err(|_| allowed())?;
    let is_http = matches!(url.scheme(), "http" | "https") && url.host_str().is_some_and(|host| !host.is_empty());
    let is_plain =
        url.username().is_empty() && url.password().is_none() && url.query().is_none() && url.fragment().is_none();
    if !is_http || !is_plain {
        return Err(allowed());
    }
    if is_base {
        url.set_path(&format!("{}{path}", url.path().trim_end_matches('/')));
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";

    fn resolve(base: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<Target>, SettingError> {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name);
        let value = |name: &str| value(name).map(|(_, value)| (*value).to_owned());
        Target::resolve_with(base.map(|base| (ENDPOINT, base)), &Source(&value))
    }

    fn url(base: Option<&str>, variables: &[(&str, &str)]) -> Option<String> {
        resolve(base, variables).expect("settings").map(|target| target.url.to_string())
    }

    #[test]
    fn export_is_off_without_endpoint() {
        assert_eq!(url(None, &[]), None);
        assert_eq!(url(Some(" "), &[(TRACES_ENDPOINT, "")]), None);
        assert_eq!(url(Some("http://c:4318"), &[("OTEL_SDK_DISABLED", "TRUE")]), None);
        assert_eq!(url(Some("http://c:4318"), &[("OTEL_TRACES_EXPORTER", "none")]), None);
    }

    #[test]
    fn base_endpoint_gets_traces_path_unlike_traces_endpoint() {
        let whole = Some("http://c:4318/v1/traces".to_owned());
        assert_eq!(url(Some("http://c:4318"), &[]), whole);
        assert_eq!(url(Some("http://c:4318/"), &[]), whole);
        assert_eq!(url(Some("https://c/otlp/"), &[]).as_deref(), Some("https://c/otlp/v1/traces"));
        assert_eq!(url(Some("http://c"), &[(TRACES_ENDPOINT, "http://t/x")]).as_deref(), Some("http://t/x"));
    }

    #[test]
    fn unusable_endpoint_is_one_line_without_its_value() {
        for text in ["collector:4318", "grpc://c:4317", "http://", "http://me:planted@c", "http://c?key=planted"] {
            let error = resolve(Some(text), &[]).expect_err(text).to_string();
            assert!(error.starts_with(ENDPOINT) && error.contains("http://collector:4318"), "{error}");
            assert!(!error.contains("planted") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn batch_timeout_defaults_to_ten_seconds() {
        let timeout = |variables| resolve(Some("http://c"), variables).expect("settings").expect("a target").timeout;
        assert_eq!(timeout(&[]), Duration::from_secs(10));
        assert_eq!(timeout(&[("OTEL_EXPORTER_OTLP_TIMEOUT", "250")]), Duration::from_millis(250));
    }
}
