module modelrelay.io/cluster/pause

go 1.26.0
