-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted
-- ARGV[1] prefix of other keys  [2] number of jobs; then bucket and id of each job; then hashes of keys
-- Returns the checkpoint and, if there is one, the records of the jobs and the values of the keys.
local found = mark()
if not found[2] then
  return found
end
local prefix = ARGV[1]
local jobs = tonumber(ARGV[2])
for i = 3, 2 + 2 * jobs, 2 do
  local bucket, id = ARGV[i], ARGV[i + 1]
  local key = prefix .. 'job:' .. bucket
  local record = redis.call('HGET', key, id)
  if not record then
    -- The job is unknown, or its record is lost. The flow of a lost record is unknown, and a search in all flows could take
    -- long.
    local is_known = redis.call('SISMEMBER', KEYS[5], bucket) == 1
    if is_known and (redis.call('EXISTS', key) == 0 or redis.call('ZSCORE', KEYS[4], id)) then
      return without_mark()
    end
  end
  found[#found + 1] = record
end
for first = 3 + 2 * jobs, #ARGV, 4000 do
  local names = {}
  for i = first, math.min(first + 3999, #ARGV) do
    names[#names + 1] = prefix .. 'idem:' .. ARGV[i]
  end
  for _, value in ipairs(redis.call('MGET', unpack(names))) do
    found[#found + 1] = value
  end
end
return found
