//! Clients that present the token of their ServiceAccount instead of an API key.

use modelrelay_harness::client::{Reply, Request};
use modelrelay_harness::fake_kubernetes::{AN_HOUR, FakeKubernetes, made_up};
use modelrelay_harness::relay::{Relay, RelayBuilder};
use modelrelay_harness::worker::FakeWorker;
use serde_json::{Value, json};

use crate::support::{
    anthropic_error, chat, check_retry_after, messages, model_ids, one_provider, openai_error, tag_of, tagged,
};
use crate::usage::{finish, new_key, wait_for_requests};

pub(crate) const AUDIENCE: &str = "modelrelay-clients";
pub(crate) const CHAT: &str = "apps/chat";

/// A relay in a Pod of this cluster with these tenants.
pub(crate) fn relay_with(kubernetes: &FakeKubernetes, tenants: &str) -> RelayBuilder {
    relay_in(kubernetes, yaml(tenants))
}

fn relay_in(kubernetes: &FakeKubernetes, yaml: String) -> RelayBuilder {
    let relay = Relay::builder().config(yaml);
    kubernetes.account_variables().into_iter().fold(relay, |relay, (name, value)| relay.env(name, &value))
}

fn yaml(tenants: &str) -> String {
    format!("requireApiKeys: true\ntenants: {tenants}\n{}", one_provider(""))
}

/// A request of a Pod that runs as this account.
fn chat_of(kubernetes: &FakeKubernetes, account: &str) -> Request {
    chat("m").bearer(&kubernetes.token(account, AUDIENCE, AN_HOUR))
}

/// Sends a request that is answered.
pub(crate) async fn served(relay: &Relay, worker: &mut FakeWorker, request: Request) {
    let pending = relay.begin(request);
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

pub(crate) fn unauthorized(reply: &Reply) -> String {
    assert_eq!(reply.header("www-authenticate").as_deref(), Some("Bearer"));
    openai_error(reply, 401, "authentication_error", "invalid_api_key")
}

#[tokio::test]
async fn token_of_tenant_is_accepted_and_not_forwarded() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, "[{namespace: apps, serviceAccount: chat}]").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let token = kubernetes.token(CHAT, AUDIENCE, AN_HOUR);
    let theirs = ("sk-of-the-backend", "Bearer sk-of-the-backend");
    for (request, kept) in [
        (chat("m").bearer(&token), [None, None]),
        (messages("m").header("x-api-key", &token), [None, None]),
        (chat("m").bearer(&token).header("x-api-key", theirs.0), [None, Some(theirs.0)]),
        (chat("m").bearer(theirs.0).header("x-api-key", &token), [Some(theirs.1), None]),
    ] {
        let pending = relay.begin(request);
        let job = worker.expect_request().await;
        assert_eq!([job.header("authorization"), job.header("x-api-key")], kept);
        worker.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
    }
    let reply = relay.fetch(Request::get("/v1/models").bearer(&token)).await.with_status(200);
    assert_eq!(model_ids(&reply.json()), ["m"]);
    assert_eq!(kubernetes.reviewed(), std::slice::from_ref(&token));
    assert!(!relay.log().dump().contains(token.rsplit('.').next().expect("a signature")), "the log has the token");
}

#[tokio::test]
async fn invalid_client_tokens_are_401() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, "[{namespace: apps}]").start().await;
    let forged = made_up(CHAT, AUDIENCE, AN_HOUR, 1);
    let refused = [
        (forged.clone(), "the cluster rejected the ServiceAccount token"),
        (kubernetes.token(CHAT, "modelrelay", AN_HOUR), "wrong audience; it must be modelrelay-clients"),
        (kubernetes.token(CHAT, AUDIENCE, -61), "the token has expired"),
        ("eyJhIjoxfQ.eyJhIjoxfQ.c2ln".to_owned(), "not a ServiceAccount token"),
    ];
    for (token, why) in &refused {
        let message = unauthorized(&relay.fetch(chat("m").bearer(token)).await);
        assert!(message.contains(why), "{message}");
        let message =
            anthropic_error(&relay.fetch(messages("m").header("x-api-key", token)).await, 401, "authentication_error");
        assert!(message.contains(why), "{message}");
        assert_eq!(relay.fetch(Request::get("/v1/models").bearer(token)).await.status, 401);
    }
    for random in ["sk-other", "mr-x-y", "a.b.c", "eyJ", "..", &format!("{forged}.x"), &"x".repeat(9000)] {
        assert_eq!(unauthorized(&relay.fetch(chat("m").bearer(random)).await), "Invalid API key");
    }
    assert_eq!(unauthorized(&relay.fetch(chat("m")).await), "API key required");
    // Only a plausible token causes a review, and only one.
    assert_eq!(kubernetes.reviewed(), [forged]);
}

#[tokio::test]
async fn account_without_tenant_is_403_naming_it() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, "[{namespace: apps, serviceAccount: chat}]").start().await;
    let reply = relay.fetch(chat_of(&kubernetes, "apps/other")).await;
    let message = openai_error(&reply, 403, "permission_error", "unknown_tenant");
    assert!(message.contains("ServiceAccount other of namespace apps belongs to no tenant"), "{message}");
    assert!(message.contains("add {namespace: apps, serviceAccount: other} to tenants"), "{message}");
    // A made-up token reveals nothing about tenants.
    for account in ["apps/chat", "apps/other"] {
        let reply = relay.fetch(chat("m").bearer(&made_up(account, AUDIENCE, AN_HOUR, 1))).await;
        assert_eq!(unauthorized(&reply), "the cluster rejected the ServiceAccount token");
    }
}

#[tokio::test]
async fn tokens_of_workers_and_clients_are_not_exchangeable() {
    let kubernetes = FakeKubernetes::start().await;
    let yaml = "requireApiKeys: true\ntenants: [{namespace: apps}]\nproviders:\n- name: local\n  workerServiceAccounts: [apps/chat]\n";
    let relay = relay_in(&kubernetes, yaml.to_owned()).start().await;
    let of_worker = kubernetes.token(CHAT, "modelrelay", AN_HOUR);
    let of_client = kubernetes.token(CHAT, AUDIENCE, AN_HOUR);
    assert_eq!(relay.dial().token(&of_client).refused().await.status, 401);
    let mut worker = relay.dial().token(&of_worker).open().await;
    worker.register(&["m"], 1).await;
    unauthorized(&relay.fetch(chat("m").bearer(&of_worker)).await);
    served(&relay, &mut worker, chat("m").bearer(&of_client)).await;
}

#[tokio::test]
async fn configured_client_audience_is_required() {
    let kubernetes = FakeKubernetes::start().await;
    let relay =
        relay_with(&kubernetes, "[{namespace: apps}]").env("CLIENT_TOKEN_AUDIENCE", "relay-a.example").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    unauthorized(&relay.fetch(chat_of(&kubernetes, CHAT)).await);
    served(&relay, &mut worker, chat("m").bearer(&kubernetes.token(CHAT, "relay-a.example", AN_HOUR))).await;
}

#[tokio::test]
async fn accounts_of_namespace_share_its_limits() {
    let kubernetes = FakeKubernetes::start().await;
    let tenants =
        "[{namespace: apps, maxInFlight: 1, models: [m]}, {namespace: apps, serviceAccount: chat, models: [n]}]";
    let relay = relay_with(&kubernetes, tenants).start().await;
    let mut worker = relay.worker(&["m", "n"], 4).await;
    let pending = relay.begin(chat_of(&kubernetes, "apps/one"));
    let job = worker.expect_request().await;
    let reply = relay.fetch(chat_of(&kubernetes, "apps/two")).await;
    openai_error(&reply, 429, "rate_limit_error", "key_limit");
    check_retry_after(&reply);
    // The account with its own tenant has other limits.
    let of_chat = kubernetes.token(CHAT, AUDIENCE, AN_HOUR);
    openai_error(&relay.fetch(chat("m").bearer(&of_chat)).await, 403, "permission_error", "model_forbidden");
    served(&relay, &mut worker, chat("n").bearer(&of_chat)).await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    served(&relay, &mut worker, chat_of(&kubernetes, "apps/two")).await;
}

#[tokio::test]
async fn tenant_has_usage_metrics_and_token_limit() {
    let kubernetes = FakeKubernetes::start().await;
    let tenants = "[{namespace: apps, name: Web apps, tokensPerMinute: 1000, weight: 2.5, class: batch}]";
    let relay = relay_with(&kubernetes, tenants).start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat_of(&kubernetes, CHAT));
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, &[("content-type", "application/json")]).await;
    worker.pieces(&job, b"{}").await;
    finish(&mut worker, &job, [900, 0, 200]).await;
    let _ = pending.reply().await.with_status(200);
    wait_for_requests(&relay, 1).await;
    let rows = relay.admin_json("/admin/usage?key=ns:apps").await["usage"].clone();
    assert_eq!((&rows[0]["key_id"], &rows[0]["key"]), (&json!("ns:apps"), &json!("Web apps")));
    assert_eq!((&rows[0]["input_tokens"], &rows[0]["output_tokens"]), (&json!(900), &json!(200)));
    assert_eq!(relay.metric("modelrelay_key_tokens_total{key=\"Web apps\",type=\"input\"}").await, 900.0);
    // The limit is that of the namespace.
    let reply = relay.fetch(chat_of(&kubernetes, "apps/other")).await;
    openai_error(&reply, 429, "rate_limit_error", "token_limit");
    check_retry_after(&reply);
    let listed = relay.admin_json("/admin/keys").await;
    let tenant = &listed["tenants"][0];
    let shown = ["id", "name", "namespace", "service_account", "weight", "class", "tokens_per_minute", "in_flight"];
    let expected = [
        json!("ns:apps"),
        json!("Web apps"),
        json!("apps"),
        Value::Null,
        json!(2.5),
        json!("batch"),
        json!(1000),
        json!(0),
    ];
    assert_eq!(shown.map(|field| tenant[field].clone()), expected, "{listed}");
    assert!(tenant["last_used_at"].is_u64() && listed["keys"] == json!([]), "{listed}");
}

#[tokio::test]
async fn class_of_tenant_orders_its_requests() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, "[{namespace: jobs, class: batch}, {namespace: apps, class: interactive}]");
    let relay = relay.start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let (_, key) = new_key(&relay, &json!({"name": "k"})).await;
    let [job_token, app_token] = ["jobs/x", "apps/x"].map(|account| kubernetes.token(account, AUDIENCE, AN_HOUR));
    let mut clients = vec![relay.begin(tagged("m", "first").bearer(&key))];
    let mut running = worker.expect_request().await;
    for (count, (tag, token)) in
        [("batch", &job_token), ("normal", &key), ("interactive", &app_token)].into_iter().enumerate()
    {
        clients.push(relay.begin(tagged("m", tag).bearer(token)));
        relay.wait_for_queue_depth("local", count as u64 + 1).await;
    }
    for expected in ["interactive", "normal", "batch"] {
        worker.answer(&running, &json!({})).await;
        running = worker.expect_request().await;
        assert_eq!(tag_of(&running), expected);
    }
    worker.answer(&running, &json!({})).await;
    for client in clients {
        let _ = client.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn changed_tenants_apply_without_restart() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, "[{namespace: other}]").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let token = kubernetes.token(CHAT, AUDIENCE, AN_HOUR);
    let send = || chat("m").bearer(&token);
    assert_eq!(relay.fetch(send()).await.status, 403);
    relay.replace_file("relay.yaml", &yaml("[{namespace: apps}]"));
    relay
        .eventually("the tenant", async || relay.admin_json("/admin/keys").await["tenants"][0]["id"] == "ns:apps")
        .await;
    served(&relay, &mut worker, send()).await;
    let pending = relay.begin(send());
    let job = worker.expect_request().await;
    relay.replace_file("relay.yaml", &yaml("[]"));
    relay.eventually("no tenant", async || relay.admin_json("/admin/keys").await["tenants"] == json!([])).await;
    assert_eq!(unauthorized(&relay.fetch(send()).await), "Invalid API key");
    // What runs may finish.
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    assert_eq!(kubernetes.reviewed().len(), 1);
}

#[tokio::test]
async fn tenant_cannot_be_changed_as_key() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_with(&kubernetes, "[{namespace: apps, serviceAccount: chat}]").start().await;
    let path = "/admin/keys/sa:apps%2Fchat";
    let reply = relay.admin("DELETE", path).await.with_status(409);
    assert_eq!(reply.json()["error"]["code"], "configured_tenant", "{}", reply.text());
    assert_eq!(relay.admin("DELETE", "/admin/keys/sa:apps%2Fother").await.status, 404);
    let token = kubernetes.token(CHAT, AUDIENCE, AN_HOUR);
    assert_eq!(relay.fetch(Request::get("/v1/models").bearer(&token)).await.status, 200);
}

#[tokio::test]
async fn tenants_require_keys_cluster_and_own_audience() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = || relay_with(&kubernetes, "[{namespace: apps}]");
    let open = format!("tenants: [{{namespace: apps}}]\n{}", one_provider(""));
    for (builder, expected) in [
        (relay_in(&kubernetes, open), "tenants: they require requireApiKeys: true"),
        (relay().without_env("KUBERNETES_SERVICE_HOST"), "tenants requires a Pod"),
        (relay().env("CLIENT_TOKEN_AUDIENCE", "modelrelay"), "CLIENT_TOKEN_AUDIENCE (--client-token-audience)"),
        (relay_with(&kubernetes, "[{namespace: apps}, {namespace: apps}]"), "tenants[1]"),
    ] {
        let (status, log) = builder.start_and_exit().await;
        assert!(!status.success() && log.dump().contains(expected), "{}", log.dump());
    }
}
