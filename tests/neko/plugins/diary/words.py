TITLE = "the diary"
