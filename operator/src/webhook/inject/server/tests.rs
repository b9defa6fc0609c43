use axum::routing::get;
use std::net::SocketAddr;
use std::time::SystemTime;
use tokio::io::AsyncReadExt;

use super::*;
use crate::webhook::certs::material;

const GRACE: Duration = Duration::from_secs(2);
const HOST: &str = "webhook.system.svc";

struct Scene {
    address: SocketAddr,
    certificates: Arc<Certificates>,
    shutdown: CancellationToken,
    server: tokio::task::JoinHandle<Result<(), rustls::Error>>,
}

async fn scene() -> Scene {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/", get(|| async { "hello" }));
    let certificates = Arc::new(Certificates::default());
    let shutdown = CancellationToken::new();
    let server = tokio::spawn(serve(listener, router, Arc::clone(&certificates), GRACE, shutdown.clone()));
    Scene { address, certificates, shutdown, server }
}

/// An authority with a certificate.
fn data() -> material::Data {
    let (now, day) = (SystemTime::now(), Duration::from_secs(86_400));
    let mut data = material::Data::new();
    material::new_authority(&mut data, now, day, false).unwrap();
    material::new_leaf(&mut data, now, day, &[HOST.to_owned()]).unwrap();
    data
}

impl Scene {
    /// A client that trusts only the authority of `data`.
    fn client(&self, data: &material::Data) -> reqwest::Client {
        reqwest::Client::builder()
            .tls_certs_only([reqwest::Certificate::from_pem(&material::bundle(data)).unwrap()])
            .resolve(HOST, self.address)
            .build()
            .unwrap()
    }

    fn serve(&self, data: &material::Data) {
        self.certificates.store(material::served(data).unwrap());
    }

    fn url(&self) -> String {
        format!("https://{HOST}:{}/", self.address.port())
    }

    async fn get(&self, client: &reqwest::Client) -> Result<String, reqwest::Error> {
        client.get(self.url()).send().await?.text().await
    }
}

#[tokio::test]
async fn server_without_certificate_accepts_no_handshake() {
    let scene = scene().await;
    let data = data();
    let client = scene.client(&data);
    assert!(!scene.certificates.is_ready());
    assert!(scene.get(&client).await.is_err());
    scene.serve(&data);
    assert!(scene.certificates.is_ready());
    assert_eq!(scene.get(&client).await.unwrap(), "hello");
}

#[tokio::test]
async fn replaced_certificate_is_served_on_next_handshake() {
    let scene = scene().await;
    let (old, new) = (data(), data());
    scene.serve(&old);
    let open = scene.client(&old);
    assert_eq!(scene.get(&open).await.unwrap(), "hello");
    scene.serve(&new);
    // An open connection continues; a new one uses the new certificate.
    assert_eq!(scene.get(&open).await.unwrap(), "hello");
    assert!(scene.get(&scene.client(&old)).await.is_err());
    assert_eq!(scene.get(&scene.client(&new)).await.unwrap(), "hello");
}

#[tokio::test]
async fn silent_peers_do_not_block_others() {
    let scene = scene().await;
    let data = data();
    scene.serve(&data);
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(TcpStream::connect(scene.address).await.unwrap());
    }
    assert_eq!(scene.get(&scene.client(&data)).await.unwrap(), "hello");
    // The silent connections are closed.
    let first = &mut silent[0];
    let end = tokio::time::timeout(HANDSHAKE_TIMEOUT * 2, first.read(&mut [0; 1])).await.unwrap();
    assert_eq!(end.unwrap_or(0), 0);
}

#[tokio::test]
async fn shutdown_answers_last_requests_and_closes_connections() {
    let scene = scene().await;
    let data = data();
    scene.serve(&data);
    let client = scene.client(&data);
    scene.get(&client).await.unwrap();
    scene.shutdown.cancel();
    // An open connection, and a new one.
    for client in [client, scene.client(&data)] {
        let response = client.get(scene.url()).send().await.unwrap();
        assert_eq!(response.headers()[header::CONNECTION], "close");
    }
    tokio::time::timeout(GRACE + LAST_ANSWERS, scene.server).await.unwrap().unwrap().unwrap();
    assert!(TcpStream::connect(scene.address).await.is_err());
}
