//! The Dockerfiles and `make images` produce the same image: users who build with a container engine run what is
//! tested.

use std::{collections::BTreeMap, path::Path};

use modelrelay_cluster::Command;
use serde_json::Value;

/// The parts of an image that matter at run time.
#[derive(Debug, PartialEq, Eq)]
struct Image {
    config: BTreeMap<String, Value>,
    /// Path, type and mode, and digest.
    files: Vec<String>,
}

async fn same_image_both_ways(program: &str) {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace exists");
    let images = workspace.join("target/images");
    let archive = images.join(format!("modelrelay-{program}.tar"));
    assert!(archive.exists(), "{} is missing: run scripts/images", archive.display());
    let folder = tempfile::tempdir().expect("a folder");
    let buildah = |arguments: &str| {
        // No daemon, no overlay, no user namespace, so that this works inside a container too.
        let storage = ["root", "runroot"].map(|part| format!("--{part}={}", folder.path().join(part).display()));
        Command::new("buildah").args(storage).arg("--storage-driver=vfs").args(arguments.split_whitespace())
    };
    let dockerfile = workspace.join(format!("deploy/docker/Dockerfile.{program}"));
    buildah("build --isolation chroot --timestamp 0 --tag built --file").arg(dockerfile).arg(images.join("bin")).await;
    buildah(&format!("pull oci-archive:{}", archive.display())).await;
    let mut built = Vec::new();
    for name in ["built".to_owned(), format!("localhost/modelrelay-{program}:dev")] {
        let inspected = buildah(&format!("inspect --type image {name}")).await;
        let inspected: Value = serde_json::from_str(&inspected).expect("buildah prints JSON");
        let container = buildah(&format!("from --pull-never {name}")).await;
        let root = buildah(&format!("mount {}", container.trim())).await;
        built.push(Image { config: config_of(&inspected["OCIv1"]["config"]), files: files_of(root.trim()).await });
    }
    let packed = built.pop().expect("two images");
    assert_eq!(built.pop().expect("two images"), packed);
    assert_eq!(packed.config["User"], "65532:65532");
    assert_eq!(packed.config["Entrypoint"], serde_json::json!([format!("/modelrelay-{program}")]));
}

/// Everything but buildah's own label.
fn config_of(config: &Value) -> BTreeMap<String, Value> {
    let mut config: BTreeMap<String, Value> = serde_json::from_value(config.clone()).expect("the config is an object");
    if let Some(labels) = config.get_mut("Labels").and_then(Value::as_object_mut) {
        labels.retain(|name, _| !name.starts_with("io.buildah."));
    }
    config
}

async fn files_of(root: &str) -> Vec<String> {
    let list =
        "cd \"$1\" && find . -mindepth 1 -printf '%P %y %m ' \\( -type f -exec sha256sum {} \\; -o -printf '\\n' \\)";
    let listed = Command::new("sh").args(["-c", list, "sh", root]).await;
    let mut files: Vec<String> = listed.lines().map(str::to_owned).collect();
    files.sort();
    files
}

fn has_buildah() -> bool {
    let found =
        std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|it| it.join("buildah").exists()));
    if !found {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "cannot run: buildah is missing");
        eprintln!("cannot run: buildah is missing");
    }
    found
}

#[tokio::test]
async fn dockerfiles_build_packed_images() {
    if !has_buildah() {
        return;
    }
    for program in ["relay", "worker", "operator"] {
        same_image_both_ways(program).await;
    }
}
