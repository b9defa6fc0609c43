//! Every replica's part: serve the certificate in the Secret.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use tracing::{info, warn};

use super::{Certificates, Settings, material};
use crate::cluster::follow::follow;

/// Follows the Secret and serves its certificate. If the Secret cannot be used, the previous certificate stays in use.
/// This never ends.
pub async fn run_reader(client: Client, settings: Settings, store: Arc<Certificates>) {
    let api = Api::<Secret>::namespaced(client, &settings.namespace);
    let mut last = Last::default();
    follow(&api, &settings.secret, |secret| take(secret.as_ref(), &settings.secret, &store, &mut last)).await;
}

/// The problem that was logged last, so that it is logged once and not at every read.
#[derive(Default)]
struct Last(Option<String>);

fn take(secret: Option<&Secret>, name: &str, store: &Certificates, last: &mut Last) {
    let found = match secret {
        None => Err("the Secret does not exist".to_owned()),
        Some(secret) => {
            let empty = material::Data::new();
            material::served(secret.data.as_ref().unwrap_or(&empty)).map_err(|unusable| unusable.to_string())
        }
    };
    match found {
        Ok(served) => {
            last.0 = None;
            if store.store(served) {
                let expires = store.expires_at().map(rfc3339).unwrap_or_default();
                info!(secret = name, expires, "webhook certificate loaded");
            }
        }
        Err(why) => {
            if last.0.as_ref() != Some(&why) {
                warn!(secret = name, why, ready = store.is_ready(), "failed to load the webhook's certificate");
                last.0 = Some(why);
            }
        }
    }
}

fn rfc3339(time: std::time::SystemTime) -> String {
    k8s_openapi::jiff::Timestamp::try_from(time).map(|time| time.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::webhook::certs::material::Data;
    use std::time::{Duration, SystemTime};

    fn secret(data: Data) -> Secret {
        Secret { data: Some(data), ..Secret::default() }
    }

    fn made() -> Data {
        let (now, day) = (SystemTime::now(), Duration::from_secs(86_400));
        let mut data = Data::new();
        material::new_authority(&mut data, now, day, false).unwrap();
        material::new_leaf(&mut data, now, day, &["webhook.system.svc".to_owned()]).unwrap();
        data
    }

    #[test]
    fn certificates_are_not_ready_without_secret() {
        let (store, mut last) = (Certificates::default(), Last::default());
        take(None, "s", &store, &mut last);
        assert!(!store.is_ready());
        take(Some(&secret(made())), "s", &store, &mut last);
        assert!(store.is_ready());
        let left = store.expires_at().unwrap().duration_since(SystemTime::now()).unwrap();
        assert!(left <= Duration::from_secs(86_400) && left > Duration::from_secs(86_000), "{left:?}");
    }

    #[test]
    fn last_valid_certificate_stays_in_use() {
        let (store, mut last) = (Certificates::default(), Last::default());
        take(Some(&secret(made())), "s", &store, &mut last);
        let expires = store.expires_at();
        take(None, "s", &store, &mut last);
        take(Some(&secret(Data::new())), "s", &store, &mut last);
        let mut other_key = made();
        other_key.insert("tls.crt".to_owned(), made()["tls.crt"].clone());
        take(Some(&secret(other_key)), "s", &store, &mut last);
        assert_eq!((store.is_ready(), store.expires_at()), (true, expires));
        assert!(last.0.is_some_and(|why| why.starts_with("tls.crt and tls.key: ")));
    }
}
