use modelrelay_operator::{
    cache,
    context::{Context, Span},
    defaults::Defaults,
    provider, relay_client,
};
#[tokio::main]
async fn main() {
    tracing_subscriber::fmt().with_env_filter("info,modelrelay_operator=debug").init();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = kube::Client::try_default().await.unwrap();
    let defaults = Defaults {
        relay: modelrelay_operator::defaults::RelayDefaults {
            image: "localhost/modelrelay-relay:dev".into(),
            ..Default::default()
        },
        ..Default::default()
    };
    let ctx = Context::new(client.clone(), defaults, "mr-system".into(), "dev".into());
    let (caches, requests, watches) = cache::start(&client, &Span::Cluster);
    let c = ctx.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(std::time::Duration::from_secs(20)).await;
            eprintln!(
                "{}",
                c.metrics
                    .render()
                    .lines()
                    .filter(|l| !l.starts_with('#')
                        && (l.contains("reconcil") && l.contains("_total")
                            || l.contains("resources")
                            || l.contains("relay_api")))
                    .collect::<Vec<_>>()
                    .join("\n")
            );
        }
    });
    tokio::join!(
        watches,
        provider::run(ctx.clone(), caches.clone(), requests.providers),
        relay_client::run(ctx, caches)
    );
}
