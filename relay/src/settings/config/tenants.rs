//! `tenants` of `relay.yaml`: the ServiceAccounts whose Pods may call the relay with their own token.

use std::collections::HashSet;

use serde::Deserialize;
use serde_json::Number;

use super::ConfigError;
use super::bounds::{bounded, within};
use crate::dispatch::{Class, ShareError, Weight};
use crate::keys::edit::{MAX_NAME_CHARS, MAX_SCOPE, MAX_SCOPE_CHARS, MAX_TOKENS, is_printable};
use crate::keys::{KeyLimits, Tenant};
use crate::kubernetes::identity::{is_account_name, is_namespace};

/// The most tenants; a namespace needs one for all its ServiceAccounts.
const MAX_TENANTS: usize = 128;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawTenant {
    namespace: String,
    service_account: Option<String>,
    name: Option<String>,
    weight: Option<Number>,
    class: Option<String>,
    providers: Option<Vec<String>>,
    models: Option<Vec<String>>,
    max_in_flight: Option<u32>,
    max_queue_percent: Option<u8>,
    tokens_per_minute: Option<u64>,
    tokens_per_day: Option<u64>,
}

/// Validates all tenants.
pub(super) fn tenants(raw: Option<&[RawTenant]>) -> Result<Vec<Tenant>, ConfigError> {
    let raw = raw.unwrap_or_default();
    bounded("tenants", raw.len(), MAX_TENANTS)?;
    let (mut ids, mut names) = (HashSet::new(), HashSet::new());
    let mut tenants = Vec::with_capacity(raw.len());
    for (index, entry) in raw.iter().enumerate() {
        let place = format!("tenants[{index}]");
        let tenant = tenant(&place, entry)?;
        if !ids.insert(tenant.id()) {
            let account = entry.service_account.as_deref().unwrap_or("every ServiceAccount");
            return Err(ConfigError::new(format!(
                "{place}: {account} of namespace {} has a tenant already: list it once",
                tenant.namespace
            )));
        }
        if let Some(name) = tenant.name.clone().filter(|name| !names.insert(name.clone())) {
            return Err(ConfigError::refused(&format!("{place}.name"), &name, "names of tenants must be unique"));
        }
        tenants.push(tenant);
    }
    Ok(tenants)
}

fn tenant(place: &str, raw: &RawTenant) -> Result<Tenant, ConfigError> {
    let at = |field: &str| format!("{place}.{field}");
    if !is_namespace(&raw.namespace) {
        return Err(ConfigError::refused(&at("namespace"), &raw.namespace, "the name of a namespace"));
    }
    if let Some(account) = raw.service_account.as_ref().filter(|account| !is_account_name(account)) {
        return Err(ConfigError::refused(&at("serviceAccount"), account, "the name of a ServiceAccount"));
    }
    if let Some(name) = raw.name.as_ref().filter(|name| !is_plain(name, MAX_NAME_CHARS)) {
        let allowed = format!("1 to {MAX_NAME_CHARS} characters, no control characters");
        return Err(ConfigError::refused(&at("name"), name, &allowed));
    }
    within(&at("maxInFlight"), raw.max_in_flight, 1, u32::MAX)?;
    within(&at("maxQueuePercent"), raw.max_queue_percent, 1, 100)?;
    within(&at("tokensPerMinute"), raw.tokens_per_minute, 1, MAX_TOKENS)?;
    within(&at("tokensPerDay"), raw.tokens_per_day, 1, MAX_TOKENS)?;
    Ok(Tenant {
        namespace: raw.namespace.clone(),
        service_account: raw.service_account.clone(),
        name: raw.name.clone(),
        weight: weight(&at("weight"), raw.weight.as_ref())?,
        class: class(&at("class"), raw.class.as_deref())?,
        limits: KeyLimits {
            providers: scope(&at("providers"), raw.providers.as_ref())?,
            models: scope(&at("models"), raw.models.as_ref())?,
            expires_at: None,
            max_in_flight: raw.max_in_flight,
            max_queue_percent: raw.max_queue_percent,
            tokens_per_minute: raw.tokens_per_minute,
            tokens_per_day: raw.tokens_per_day,
        },
    })
}

fn weight(place: &str, raw: Option<&Number>) -> Result<Weight, ConfigError> {
    let Some(number) = raw else { return Ok(Weight::default()) };
    let weight = number.as_f64().ok_or(ShareError::Weight).and_then(Weight::try_from);
    weight.map_err(|error| ConfigError::new(format!("{place}: must {error}, not {number}")))
}

fn class(place: &str, raw: Option<&str>) -> Result<Class, ConfigError> {
    let Some(text) = raw else { return Ok(Class::default()) };
    text.parse().map_err(|_| ConfigError::refused(place, text, "interactive, normal or batch"))
}

/// An empty list would leave a tenant without any access, which cannot be intended.
fn scope(place: &str, raw: Option<&Vec<String>>) -> Result<Option<Vec<String>>, ConfigError> {
    let Some(names) = raw else { return Ok(None) };
    let fits = (1..=MAX_SCOPE).contains(&names.len()) && names.iter().all(|name| is_plain(name, MAX_SCOPE_CHARS));
    if fits {
        return Ok(Some(names.clone()));
    }
    Err(ConfigError::new(format!(
        "{place}: must be a list of 1 to {MAX_SCOPE} names of at most {MAX_SCOPE_CHARS} characters; without it, all are allowed"
    )))
}

fn is_plain(text: &str, most: usize) -> bool {
    is_printable(text, most) && text.trim() == text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(yaml: &str) -> Result<Vec<Tenant>, String> {
        let raw: Vec<RawTenant> = serde_yaml::from_str(yaml).map_err(|error| error.to_string())?;
        tenants(Some(&raw)).map_err(|error| error.to_string())
    }

    #[test]
    fn omitted_fields_of_tenant_have_defaults() {
        let tenants =
            parsed("[{namespace: apps}, {namespace: apps, serviceAccount: chat.v2, weight: 2.5, class: batch}]");
        let tenants = tenants.expect("valid");
        let plain = Tenant {
            namespace: "apps".to_owned(),
            service_account: None,
            name: None,
            weight: Weight::default(),
            class: Class::Normal,
            limits: KeyLimits::default(),
        };
        assert_eq!(tenants[0], plain);
        assert_eq!((tenants[1].weight.hundredths(), tenants[1].class), (250, Class::Batch));
        assert_eq!(tenants[1].id(), "sa:apps/chat.v2");
    }

    #[test]
    fn limits_of_tenant_are_those_of_key() {
        let yaml = "[{namespace: apps, name: Web apps, providers: [local], models: [m], maxInFlight: 4, maxQueuePercent: 25, \
                    tokensPerMinute: 100, tokensPerDay: 1000000000000}]";
        let limits = KeyLimits {
            providers: Some(vec!["local".to_owned()]),
            models: Some(vec!["m".to_owned()]),
            expires_at: None,
            max_in_flight: Some(4),
            max_queue_percent: Some(25),
            tokens_per_minute: Some(100),
            tokens_per_day: Some(1_000_000_000_000),
        };
        assert_eq!(parsed(yaml).expect("valid")[0].limits, limits);
    }

    #[test]
    fn bad_tenant_names_field_and_allowed_values() {
        for (fields, expected) in [
            ("serviceAccount: chat", "namespace"),
            ("namespace: Apps", "tenants[0].namespace: \"Apps\" is not allowed: the name of a namespace"),
            ("namespace: a, serviceAccount: a/b", "tenants[0].serviceAccount: \"a/b\" is not allowed"),
            ("namespace: a, name: ''", "tenants[0].name"),
            ("namespace: a, name: ' x'", "tenants[0].name"),
            ("namespace: a, weight: 0", "tenants[0].weight: must be a number from 0.01 to 100"),
            ("namespace: a, weight: 1.005", "tenants[0].weight"),
            (
                "namespace: a, class: urgent",
                "tenants[0].class: \"urgent\" is not allowed: interactive, normal or batch",
            ),
            ("namespace: a, models: []", "tenants[0].models: must be a list of 1 to 256 names"),
            ("namespace: a, maxInFlight: 0", "tenants[0].maxInFlight"),
            (
                "namespace: a, maxQueuePercent: 101",
                "tenants[0].maxQueuePercent: \"101\" is not allowed: an integer from 1 to 100",
            ),
            ("namespace: a, tokensPerDay: 0", "tenants[0].tokensPerDay"),
            ("namespace: a, expiresAt: x", "expiresAt"),
        ] {
            let error = parsed(&format!("[{{{fields}}}]")).expect_err(fields);
            assert!(error.contains(expected), "{fields}: {error}");
        }
    }

    #[test]
    fn account_has_one_tenant_and_name_is_unique() {
        let error = parsed("[{namespace: a}, {namespace: b}, {namespace: a}]").expect_err("twice");
        assert!(error.contains("tenants[2]: every ServiceAccount of namespace a has a tenant already"), "{error}");
        let error =
            parsed("[{namespace: a, serviceAccount: x}, {namespace: a, serviceAccount: x}]").expect_err("twice");
        assert!(error.contains("tenants[1]: x of namespace a"), "{error}");
        let error = parsed("[{namespace: a, name: web}, {namespace: b, name: web}]").expect_err("twice");
        assert!(error.contains("tenants[1].name: \"web\" is not allowed: names of tenants must be unique"), "{error}");
        assert!(parsed("[{namespace: a}, {namespace: a, serviceAccount: x}]").is_ok());
        let many: String = (0..129).map(|number| format!("{{namespace: n{number}}},")).collect();
        assert!(parsed(&format!("[{many}]")).expect_err("too many").contains("129 entries exceed the limit of 128"));
    }
}
