#![allow(clippy::needless_pass_by_value, reason = "values are written where they are used")]

use super::*;

fn problems(spec: Value) -> Vec<String> {
    let value = json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider", "metadata": {"name": "local", "namespace": "llm"},
        "spec": spec,
    });
    let provider: Provider = serde_json::from_value(value).unwrap();
    validate(&provider, &[]).err().map(|error| error.0).unwrap_or_default()
}

#[test]
fn empty_spec_is_valid() {
    assert_eq!(problems(json!({})), Vec::<String>::new());
}

#[test]
fn each_refusal_names_its_field() {
    let cases = [
        (json!({"models": [{"id": "a", "aliases": ["b", "b"]}]}), "spec.models[0].aliases[1]: \"b\" is a duplicate"),
        (
            json!({"models": [{"id": "a"}, {"id": "b", "aliases": ["a"]}]}),
            "spec.models[1].aliases[0]: \"a\" is a duplicate",
        ),
        (json!({"aliases": {"a": "b", "b": "c"}}), "spec.aliases.a: \"b\" is itself an alias"),
        (json!({"models": [{"id": "a"}], "aliases": {"b": "c"}}), "spec.aliases.b: \"c\" is not in spec.models"),
        (json!({"models": [{"id": "a"}, {"id": "b"}], "aliases": {"a": "b"}}), "spec.aliases: \"a\" is a duplicate"),
        (json!({"models": [{"id": "a"}], "fallbackModel": "c"}), "spec.fallbackModel: \"c\" is not in spec.models"),
        (json!({"aliases": {"a": "b"}, "defaultModel": " b"}), "spec.defaultModel: \" b\" is not allowed"),
        (json!({"models": [{"id": " a"}]}), "spec.models[0].id: \" a\" is not allowed"),
        (json!({"models": [{"id": "a\u{7}"}]}), "spec.models[0].id: "),
        // The relay rejects it too, with the configuration of every Provider in it.
        (json!({"models": [{"id": "a\u{200b}b"}]}), "spec.models[0].id: "),
        (
            json!({"relay": {"tenants": [{"namespace": "a", "weight": 1.25}, {"namespace": "b", "weight": 1.255}]}}),
            "spec.relay.tenants[1].weight: 1.255 is not allowed: use 0.01 to 100, with at most two decimals",
        ),
        (json!({"relay": {"tenants": [{"namespace": "a", "weight": 0}]}}), "spec.relay.tenants[0].weight: 0 is not"),
        (json!({"relay": {"tenants": [{"namespace": "a", "name": " x"}]}}), "spec.relay.tenants[0]: \" x\" is not"),
        (json!({"relay": {"tenants": [{"namespace": "a", "models": ["m\u{7}"]}]}}), "spec.relay.tenants[0]: "),
        (json!({"relay": {"logLevel": "loud"}}), "spec.relay.logLevel: \"loud\" is not allowed"),
        (
            json!({"relay": {"service": {"loadBalancerClass": "x"}}}),
            "spec.relay.service.loadBalancerClass: requires type",
        ),
        (
            json!({"relay": {"service": {"port": 8081, "workers": true}}}),
            "spec.relay.service.port: 8081 is the port for workers",
        ),
        (
            json!({"workerSecretRef": {"name": "local-worker", "key": "k"}}),
            "spec.workerSecretRef.name: local-worker is reserved",
        ),
        (
            json!({"relay": {"tls": {"secretName": "local-relay"}}}),
            "spec.relay.tls.secretName: local-relay is reserved for",
        ),
        (
            json!({"relay": {"podTemplate": {"env": [{"name": "TLS_CERT_FILE"}]}}}),
            "spec.relay.podTemplate.env[0]: TLS_CERT_FILE is set by",
        ),
        (
            json!({"relay": {"podTemplate": {"env": [{"name": "LISTEN_ADDR"}]}}}),
            "spec.relay.podTemplate.env[0]: LISTEN_ADDR",
        ),
        (
            json!({"relay": {"podTemplate": {"volumes": [{"name": "config"}]}}}),
            "spec.relay.podTemplate.volumes[0]: the name",
        ),
        (
            json!({"relay": {"podTemplate": {"volumeMounts": [{"mountPath": "/etc/modelrelay/config"}]}}}),
            "spec.relay.podTemplate.volumeMounts[0]: /etc/modelrelay/config is reserved",
        ),
        (json!({"queue": {"timeout": "1d"}}), "spec.queue.timeout: "),
        (json!({"placement": {"spillBytes": "9999999999Ti"}}), "spec.placement.spillBytes: "),
    ];
    for (spec, expected) in cases {
        let found = problems(spec.clone());
        assert!(found.len() == 1 && found[0].starts_with(expected), "{spec}: {found:?}");
    }
}

#[test]
fn all_problems_are_reported_together() {
    let spec = json!({"models": [{"id": "a"}, {"id": "a"}], "relay": {"logLevel": ""}});
    assert_eq!(problems(spec).len(), 2);
}

#[test]
fn tracing_directives_are_valid_log_levels() {
    for level in ["info", "WARN", "off", "info,modelrelay_relay=debug"] {
        assert_eq!(problems(json!({"relay": {"logLevel": level}})), Vec::<String>::new(), "{level}");
    }
}
