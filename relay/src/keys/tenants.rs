//! Tenants: ServiceAccounts of the cluster whose Pods call the relay with their own token instead of an API key.
//!
//! A tenant is part of the configuration, so no store has it, and it has no secret: the cluster verifies its token.
//! Everything behind authentication treats it as a key: fair share, limits, usage. Its id depends on the account alone,
//! so that it keeps its use and limits while name and settings change. All ServiceAccounts of a namespace that have no
//! tenant of their own share that of the namespace, if it has one.

use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;

use super::{Key, KeyLimits, KeyRecord, KeySet};
use crate::dispatch::{Class, Weight};

/// The settings of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// The namespace of its Pods.
    pub namespace: String,
    /// The ServiceAccount; `None` for all of the namespace.
    pub service_account: Option<String>,
    /// Its name, if it is not that of the account.
    pub name: Option<String>,
    /// Its weight among keys of one class.
    pub weight: Weight,
    /// The class of its requests.
    pub class: Class,
    /// Its limits.
    pub limits: KeyLimits,
}

/// All tenants at one moment.
#[derive(Debug, Default)]
pub struct Tenants {
    /// In the order of the configuration.
    configured: Vec<Tenant>,
    keys: KeySet,
}

/// A tenant as listed by `/admin/keys`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TenantInfo {
    /// The unique id, of which that of no key is one.
    pub id: String,
    /// The name.
    pub name: String,
    /// The namespace of its Pods.
    pub namespace: String,
    /// The ServiceAccount; `null` for all others of the namespace.
    pub service_account: Option<String>,
    /// Last use, in seconds of Unix time; `null` if it was not used since the relay's start.
    pub last_used_at: Option<u64>,
    /// The same in RFC 3339, with milliseconds.
    pub last_used: Option<String>,
    /// Its weight among keys of one class.
    pub weight: Weight,
    /// The class of its requests.
    pub class: Class,
    /// Its limits.
    #[serde(flatten)]
    pub limits: KeyLimits,
    /// The present number of requests in flight.
    pub in_flight: u32,
}

impl Tenant {
    /// The id: `sa:NAMESPACE/NAME`, or `ns:NAMESPACE`.
    pub fn id(&self) -> String {
        match &self.service_account {
            Some(name) => account_id(&self.namespace, name),
            None => namespace_id(&self.namespace),
        }
    }

    fn record(&self, now: SystemTime) -> KeyRecord {
        let of_account = || match &self.service_account {
            Some(account) => format!("{}/{account}", self.namespace),
            None => self.namespace.clone(),
        };
        let name = self.name.clone().unwrap_or_else(of_account);
        // No text has this digest, and nothing compares it.
        let record = KeyRecord::new(self.id(), name, [0; 32], now);
        KeyRecord { weight: self.weight, class: self.class, limits: self.limits.clone(), ..record }
    }
}

impl Tenants {
    /// True if there are no tenants.
    pub fn is_empty(&self) -> bool {
        self.configured.is_empty()
    }

    /// Returns the tenant of a ServiceAccount, and records its use.
    pub fn of_account(&self, namespace: &str, name: &str, now: SystemTime) -> Option<Arc<Key>> {
        let of_namespace = || self.keys.lookup(&namespace_id(namespace));
        let key = self.keys.lookup(&account_id(namespace, name)).or_else(of_namespace)?;
        key.touch(now);
        Some(Arc::clone(key))
    }

    /// True if a tenant has this id.
    pub fn has(&self, id: &str) -> bool {
        self.keys.lookup(id).is_some()
    }

    /// Returns the tenants of a new configuration, with the live state of those that existed before.
    #[must_use]
    pub fn renewed(&self, configured: &[Tenant], now: SystemTime) -> Self {
        let keys = self.keys.renewed(configured.iter().map(|tenant| tenant.record(now)).collect());
        Self { configured: configured.to_vec(), keys }
    }

    /// All tenants, in the order of the configuration.
    pub fn list(&self) -> Vec<TenantInfo> {
        self.configured.iter().filter_map(|tenant| Some(tenant.info(self.keys.lookup(&tenant.id())?))).collect()
    }
}

impl Tenant {
    fn info(&self, key: &Key) -> TenantInfo {
        let key = key.info();
        TenantInfo {
            id: key.id,
            name: key.name,
            namespace: self.namespace.clone(),
            service_account: self.service_account.clone(),
            last_used_at: key.last_used_at,
            last_used: key.last_used,
            weight: key.weight,
            class: key.class,
            limits: key.limits,
            in_flight: key.in_flight,
        }
    }
}

fn account_id(namespace: &str, name: &str) -> String {
    format!("sa:{namespace}/{name}")
}

fn namespace_id(namespace: &str) -> String {
    format!("ns:{namespace}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(namespace: &str, account: Option<&str>) -> Tenant {
        Tenant {
            namespace: namespace.to_owned(),
            service_account: account.map(str::to_owned),
            name: None,
            weight: Weight::default(),
            class: Class::default(),
            limits: KeyLimits::default(),
        }
    }

    fn tenants(configured: &[Tenant]) -> Tenants {
        Tenants::default().renewed(configured, SystemTime::now())
    }

    fn id_of(tenants: &Tenants, namespace: &str, name: &str) -> Option<String> {
        tenants.of_account(namespace, name, SystemTime::now()).map(|key| key.id().to_owned())
    }

    #[test]
    fn exact_account_precedes_its_namespace() {
        let all = tenants(&[tenant("apps", None), tenant("apps", Some("chat")), tenant("jobs", Some("nightly"))]);
        for (namespace, name, expected) in [
            ("apps", "chat", Some("sa:apps/chat")),
            ("apps", "default", Some("ns:apps")),
            ("apps", "chat2", Some("ns:apps")),
            ("jobs", "nightly", Some("sa:jobs/nightly")),
            ("jobs", "default", None),
            ("app", "chat", None),
            ("other", "chat", None),
        ] {
            assert_eq!(id_of(&all, namespace, name).as_deref(), expected, "{namespace}/{name}");
        }
        assert!(all.has("ns:apps") && !all.has("ns:jobs") && !all.is_empty());
    }

    #[test]
    fn accounts_of_namespace_share_one_limit() {
        let limits = KeyLimits { max_in_flight: Some(1), ..KeyLimits::default() };
        let all = tenants(&[Tenant { limits, ..tenant("apps", None) }]);
        let acquire = |name: &str| all.of_account("apps", name, SystemTime::now()).expect("a tenant").acquire();
        let held = acquire("one").expect("room");
        assert!(acquire("two").is_err());
        drop(held);
        assert!(acquire("two").is_ok());
    }

    #[test]
    fn changed_tenant_keeps_id_and_use() {
        let before = tenants(&[tenant("apps", None)]);
        let key = before.of_account("apps", "x", SystemTime::now()).expect("a tenant");
        let held = key.acquire().expect("no limit");
        let limits = KeyLimits { max_in_flight: Some(1), ..KeyLimits::default() };
        let changed = Tenant { name: Some("web".to_owned()), limits, ..tenant("apps", None) };
        let after = before.renewed(&[changed], SystemTime::now());
        let listed = after.list();
        assert_eq!((listed[0].id.as_str(), listed[0].name.as_str(), listed[0].in_flight), ("ns:apps", "web", 1));
        assert!(listed[0].last_used_at.is_some());
        let key = after.of_account("apps", "y", SystemTime::now()).expect("a tenant");
        assert!(key.acquire().is_err());
        drop(held);
        assert!(key.acquire().is_ok());
        assert_eq!(id_of(&after.renewed(&[], SystemTime::now()), "apps", "x"), None);
    }

    #[test]
    fn tenants_are_listed_as_configured() {
        let named = Tenant { name: Some("web".to_owned()), ..tenant("b", Some("x")) };
        let listed = tenants(&[named, tenant("a", Some("y")), tenant("a", None)]).list();
        let names: Vec<_> =
            listed.iter().map(|tenant| (tenant.name.as_str(), tenant.service_account.as_deref())).collect();
        assert_eq!(names, [("web", Some("x")), ("a/y", Some("y")), ("a", None)]);
    }
}
